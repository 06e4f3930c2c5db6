"""transformers' Trainer, its own train(), under DDP or with tp= fsdp= replicas= ep= (its DistributedConfig); acc= clip= (on CPUs).

    python tools/prove tools/prove/adapters/hf_trainer.py --world 2 --flags "acc=2"

train() runs in a thread. Its data loader asks for a batch, which step() gives it, and step() returns what it logs. In --both:
clip=, and model= and aux= of hf_native.py.
"""
import queue
import tempfile
import threading
from types import SimpleNamespace

import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from hf_native import BATCH, SEQ, VOCAB, distributed, modules, own_rows, place, small_model  # noqa: F401
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

NEEDS = "transformers==5.24.0, accelerate==1.15.0"
ParallelismConfig._validate_accelerator = lambda *_: None                          # it refuses CPUs


class Asked(torch.utils.data.IterableDataset):
    """The data set. It is asked for the next batch when a step is over."""

    def __init__(self, run):
        self.run = run

    def __iter__(self):
        while True:
            self.run.said.put("ready")
            yield from self.run.batch.get()


class Logged(TrainerCallback):
    def __init__(self, run):
        self.run = run

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "grad_norm" in logs:
            self.run.logged = logs["loss"], logs["grad_norm"]


class Fed(Trainer):
    def get_train_dataloader(self):
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=None)    # accelerate would cut its own up

    def _clip_grad_norm(self, model):
        self.train_dataset.run.grads = {name: param.grad.detach().clone() for name, param in self.model.named_parameters()
                                        if param.grad is not None}
        return super()._clip_grad_norm(model)


def build(flags):
    dist.init_process_group("gloo")
    sharded = any(flags.get(name, 1) > 1 for name in ("tp", "fsdp", "replicas", "ep"))
    run = SimpleNamespace(batch=queue.Queue(), said=queue.Queue(), acc=flags.get("acc", 1), tp=flags.get("tp", 1),
                          fsdp=flags.get("fsdp", 1), grads={}, logged=None)
    run.model = small_model(flags, **distributed(flags) if sharded else {})
    args = TrainingArguments(tempfile.gettempdir(), use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
                             max_steps=10**6, logging_steps=1, learning_rate=1e-2, lr_scheduler_type="constant",
                             per_device_train_batch_size=1, gradient_accumulation_steps=run.acc, optim="adamw_torch",
                             weight_decay=0.01, max_grad_norm=float(flags.get("clip", "inf")), logging_nan_inf_filter=False)
    trainer = Fed(run.model, args, train_dataset=Asked(run), callbacks=[Logged(run)])
    trainer.remove_callback(PrinterCallback)
    threading.Thread(target=train, args=(run, trainer), daemon=True).start()
    listen(run)                                           # until it asks for the first batch
    return run


def train(run, trainer):
    try:
        trainer.train()
    except BaseException as error:
        run.said.put(error)


def listen(run):
    said = run.said.get()
    if isinstance(said, BaseException):
        raise said


def step(run, inputs, targets):
    mine = own_rows(run)
    run.batch.put([dict(input_ids=x, labels=y, shift_labels=y)                     # shift_labels: they are shifted already
                   for x, y in zip(inputs[mine].chunk(run.acc), targets[mine].chunk(run.acc))])
    listen(run)
    return run.logged


def parts(run):
    return ((name, param, run.grads.get(name), None) for name, param in run.model.named_parameters())
