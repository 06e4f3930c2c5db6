"""Python imports this in every process that has this folder in PYTHONPATH. Start the recorder once torch.distributed is there."""
import importlib.util
import os
import sys


class AfterImport:
    """Lets the module be found as usual, and then calls the recorder on it."""

    def find_spec(self, name, path, target=None):
        if name != "torch.distributed.distributed_c10d":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        real = spec.loader.exec_module

        def exec_module(module):
            real(module)
            sys.path.insert(0, os.environ["PLAY_TOOLS"])
            from play.record import install
            sys.path.pop(0)
            install(module)
        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("PLAY_FOLDER"):
    sys.meta_path.insert(0, AfterImport())
