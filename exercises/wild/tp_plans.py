"""List what transformers' tensor-parallel plans may have forgotten: parameters without a rule in a region that is cut by columns.

    python exercises/wild/tp_plans.py                    # all models; or name some: apertus phi

Such a parameter is whole on every rank, but its gradient comes only from the rank's own columns or heads, so somebody has to sum
it. A model on this list is a suspect, no more: what only feeds a cut matrix, like q_a_proj, is right. tp_gradients.py tells
you which it is. Run with transformers 5.24.0.
"""
import inspect
import re
import sys

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KINDS

COLUMNS = "colwise", "packed_colwise"                     # others gather their output, and what follows is whole


def small(kind):
    """Return this model with two layers and the optional norms, without memory. None if it has no plan."""
    config = AutoConfig.for_model(kind)
    if not getattr(config, "base_model_tp_plan", None):
        return None
    for name in ("num_hidden_layers", "layer_types", "use_qk_norm", "qk_norm", "qk_layernorm"):
        value = getattr(config, name, None)
        if value is not None:
            setattr(config, name, 2 if isinstance(value, int) and value > 1 else value[:2] if isinstance(value, list) else True)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def suspects(model):
    """Yield names of parameters without a rule, beside or below a matrix that is cut by columns."""
    plan = model._tp_plan or {}
    regions = {rule.rpartition(".")[0] for rule, style in plan.items() if style in COLUMNS and "experts" not in rule}
    for name, _ in model.named_parameters():
        name = re.sub(r"\.\d+(?=\.|$)", ".*", name)       # as plans write it: layers.*.mlp
        module = name.rpartition(".")[0]
        below = any(region and name.startswith(region + ".") for region in regions)
        router = name.endswith(".gate.weight")            # the rule of the experts is also about it
        if below and not router and name not in plan and module not in plan and "experts" not in name:
            yield name


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    for kind in sys.argv[1:] or KINDS:
        try:
            model = small(kind)
        except Exception as error:                        # some need more than a default configuration
            print(f"{kind}: not tried, {type(error).__name__}")
            continue
        if model is not None and (found := [*dict.fromkeys(suspects(model))]):
            print(f"{kind}: {', '.join(found)}   ({inspect.getfile(type(model.config)).rpartition('/')[2]})", flush=True)
