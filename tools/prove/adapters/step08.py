"""Step 8 of this repository, or a copy of it (STEP=folder in the environment), with its own flags: tp=2 zero=3.

train.main itself runs, in a thread. It asks for a batch, which step() gives it, and logs what step() returns. Flags for the
model, in --both: moe=2, experts, two for each token; qk=1, QK-norm; kv=1, one key-value head; layers=8.
"""
import itertools
import json
import os
import queue
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch

BATCH, SEQ, VOCAB = 8, 16, 128
SHAPE = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_attention_heads=4, head_dim=8, max_position_embeddings=SEQ)
FLAGS = dict(model="prove", device="cuda" if torch.cuda.device_count() else "cpu", seq_len=SEQ, steps=10**6, lr=1e-2, warmup=0,
             lr_schedule="constant", grad_clip=0.5)


def model_config(flags, config):
    """Return the model's shape; take the flags that are about it out of the trainer's."""
    top_k, qk_norm = flags.pop("moe", 0), flags.pop("qk", 0)
    family = "qwen3_moe" if top_k and qk_norm else "mixtral" if top_k else "qwen3" if qk_norm else "llama"
    experts = dict(num_local_experts=4, num_experts_per_tok=top_k) if top_k else {}
    return config.ModelConfig(**SHAPE, **experts, family=family, num_hidden_layers=flags.pop("layers", 4),
                              num_key_value_heads=flags.pop("kv", 2))


def build(flags):
    folder = os.environ.get("STEP") or Path(__file__).resolve().parents[3] / "step08_5d"
    sys.path.insert(0, str(folder))
    import config
    import train
    config.PRESETS["prove"] = model_config(flags, config)
    words = FLAGS | dict(global_batch_size=BATCH, micro_batch_size=BATCH // int(os.environ["WORLD_SIZE"])) | flags
    run = SimpleNamespace(train=train, batch=queue.Queue(), said=queue.Queue())
    argv = [word for key, value in words.items() for word in (f"--{key}", str(value))]
    threading.Thread(target=main, args=(run, argv), daemon=True).start()
    listen(run)                                           # until it asks for the first batch
    return run


def listen(run):
    said = run.said.get()
    if isinstance(said, BaseException):
        raise said
    return said


def main(run, argv):
    train, batches, build_model = run.train, run.train.batches, run.train.build_model

    def asked(tokens, config, mesh, args):
        run.mesh = mesh
        for step in itertools.count():
            run.said.put("ready")
            stream, inputs, targets = run.batch.get()
            if stream is None:                            # prove may ask one process for sequences that form no stream
                yield step, [(inputs, torch.arange(inputs.shape[1], device=args.device), targets)]
            else:                                         # its own data path cuts the stream up
                args.steps = args.first_step + 1
                yield step, next(batches(stream, config, mesh, args))[1]

    def kept(*args):
        run.model = build_model(*args)
        return run.model

    class Kept(train.Optimizer):
        def __init__(self, params, args):
            super().__init__(params, args)
            run.optimizer, run.grads = self, self.grads

        def clip_grad_norm(self):
            run.grads = [grad.clone() for grad in self.grads]
            return super().clip_grad_norm()

    class KeptCheckpoints(train.resume.Checkpoints):
        def __init__(self, *args):
            super().__init__(*args)
            run.checkpoints = self

    def log(metrics, step, loss, grad_norm, lr, **more):
        run.said.put((loss, grad_norm))
    # only the main thread may set signal handlers
    with patch.multiple(signal, signal=lambda *_: None, set_wakeup_fd=lambda *_, **__: -1), \
            patch.multiple(train, batches=asked, build_model=kept, Optimizer=Kept), patch.object(train.Metrics, "log", log), \
            patch.object(train.resume, "Checkpoints", KeptCheckpoints):
        try:
            train.main(argv)
        except BaseException as error:
            run.said.put(error)


def step(run, inputs, targets):
    stream = torch.cat([inputs.flatten(), targets[-1, -1:]])
    is_stream = inputs.shape[1] == SEQ and torch.equal(stream[1:], targets.flatten())
    device = run.optimizer.grads[0].device
    run.batch.put((stream.numpy() if is_stream else None, inputs.to(device), targets.to(device)))
    result = listen(run)
    listen(run)                                           # the update is over when it asks for the next batch
    return result


def parts(run):
    import boxes
    names = {param: name for name, param in run.model.named_parameters()}
    for piece, master, grad in zip(run.optimizer.params, run.optimizer.masters, run.grads):
        param, start = getattr(piece, "origin", (piece, 0))                        # a shard of ZeRO's, or a whole parameter
        gradients = boxes.boxes(names[param], param, start, grad)
        for key, weight in boxes.boxes(names[param], param, start, master).items():
            yield names[param], weight, gradients[key], json.loads(key[key.index("["):])


def place(run):
    return {name: run.mesh.get_local_rank(name) for name in run.mesh.mesh_dim_names}


def modules(run):
    return run.model.named_modules()


def save(run, folder):
    run.checkpoints.args.checkpoint = folder
    run.checkpoints.save(steps=2)


def load(run, folder):
    from disk import index_of
    checkpoint = Path(folder, "step_00000002")
    run.checkpoints.restore(checkpoint, index_of(checkpoint))


def loaded(run):
    for param, master in zip(run.optimizer.params, run.optimizer.masters):         # weights that compute, in bfloat16
        param.data.copy_(master)
