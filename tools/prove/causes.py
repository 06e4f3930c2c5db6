"""What a difference looks like, and what it usually means: the one table of causes. The tool's README shows it (python
dev/readme.py writes it there).

The causes are in the order of a training step, because the first difference is the one to explain.
"""
from typing import NamedTuple


class Cause(NamedTuple):
    looks: str
    means: str


CAUSES = {
    # ------------------------------------------------------------------------------------------- the loss
    "log of one rank": Cause(
        "the logged loss alone: every rank has its own, and their mean or sum is right",
        "the log has one rank's share; all-reduce it. The training is right"),
    "log times a factor": Cause(
        "the logged loss alone, times a factor",
        "it is summed over ranks that all hold the same value, or divided by the wrong count. The training is right"),
    "log of something else": Cause(
        "the logged loss alone, by no simple factor",
        "the log shows a different number from the one that backward starts from. The training is right"),
    "loss times a factor": Cause(
        "the loss and all gradients times the same factor",
        "it is divided by a rank's or a micro-batch's own count, or means are summed"),
    "other data": Cause(
        "the loss and the gradients: those of a batch in which some sequences count more than once, others less or not at all",
        "ranks or micro-batches use the same data, or the data of one is left out"),
    "mean of means": Cause(
        "the loss and the gradients: those of a batch in which a target counts more if its micro-batch or rank has fewer targets",
        "each rank or micro-batch divides by its own number of targets; divide by that of the global batch"),
    "old weights": Cause(
        "the loss and the gradients: those of the weights before the last update",
        "weights are gathered before the update, or not again after it"),
    "targets at home": Cause(
        "the loss and the gradients: those of targets that were shifted only after the sequence was split",
        "shift first, then split: the last target of a part is the first token of the next"),
    "attends alone": Cause(
        "the loss: that of sequences in which each part attends only to itself",
        "the keys and values of the other ranks never reach attention"),
    "partial sum": Cause(
        "the loss; from some module on, activations are wrong, but their sum over the ranks is right",
        "each rank has a partial sum, which an all-reduce or a reduce-scatter has to add up"),
    "other weights": Cause(
        "the loss; on some ranks a module gets the right input, and every row of its output is wrong",
        "there it computes with weights other than the updated ones: they were gathered too early, or not at all"),
    "sent": Cause(
        "the loss; activations are right on one rank, and what the next module gets on another rank is something else",
        "what is sent between these ranks: other micro-batches in another order, or a buffer that was used again too early"),
    "forward": Cause(
        "the loss; activations are right up to a module, and wrong from there on",
        "look there. Embedding: rows that another rank holds. Attention: positions, mask, the order of heads, keys of other ranks. "
        "Any: dropout, a sum over ranks"),
    "end of forward": Cause(
        "the loss, though all activations are right",
        "targets (shifted within a rank's part?), or the sums inside the loss: its maximum, its count"),
    "loss": Cause(
        "the loss, by no simple factor, and no activations to compare",
        "positions, masks, targets, data, a partial sum; add modules() to the adapter, and the tool names a place"),
    # ------------------------------------------------------------------------------------------- gradients
    "all gradients times a factor": Cause(
        "the gradients of all parameters, times a factor",
        "a mean is taken twice, or a sum not divided. AdamW hides it"),
    "clipped or not": Cause(
        "the gradients of all parameters, times the gradient norm or divided by it",
        "one side clips at 1 before the gradients are compared, and the other does not"),
    "some gradients times a factor": Cause(
        "the gradients of some parameters, times a factor",
        "these are reduced twice, not divided, or divided by the size of another group"),
    "not reduced": Cause(
        "copies of a gradient differ between ranks, and their sum or mean is right",
        "they are not reduced over these ranks, and the weights drift apart; if the weights are right, they are "
        "reduced in memory other than what parts() yields"),
    "reduced in part": Cause(
        "copies of a gradient differ between ranks, and their sum is not right either",
        "they are not reduced over these ranks, and wrong before that"),
    "scaled apart": Cause(
        "every gradient is right but for a factor, and the factors differ",
        "each rank or stage clips or scales by a norm of its own"),
    "zero gradients": Cause(
        "gradients are zero",
        "they are never computed, or zeroed before the optimizer sees them"),
    "low precision": Cause(
        "gradients or weights: their digits all fit into bfloat16, float16 or float32, and those of the right ones do not",
        "they are reduced or kept in that precision"),
    "others' gradients": Cause(
        "a gradient is the sum of those of different parts of the parameter",
        "a reduction runs over ranks that hold other parts, such as other experts"),
    "gradients of some data": Cause(
        "gradients are right for some of the sequences, and lack the others; the loss is right",
        "accumulation overwrites, or a reduction misses micro-batches or ranks"),
    "not zeroed": Cause(
        "gradients contain those of the step before",
        "they, or the buffer they are sent from, were not zeroed"),
    "gradients in part": Cause(
        "gradients are right in some rows or on some ranks only",
        "look at who sends these: an index, a chunk that was left out, or a buffer that was used again"),
    "backward": Cause(
        "gradients are right from the loss down to a module, and wrong from there on",
        "look at the backward of that module: the reduction where a sharded region begins, or keys of other ranks"),
    "gradients of weights": Cause(
        "gradients of some weights, though those of all activations are right",
        "look at how these modules compute or reduce the gradients of their weights: from other inputs, rows or micro-batches"),
    "gradients": Cause(
        "gradients are wrong, and not a multiple of the right ones",
        "no cause in this table. Look where backward computes the first wrong ones"),
    # ------------------------------------------------------------------------------------------- the norm
    "norm counts": Cause(
        "the gradient norm alone: the squares of some parameters are counted n times, or 1/n times",
        "values that n ranks all hold are counted n times, or a shard is taken for a copy"),
    "norm of one rank": Cause(
        "the gradient norm alone: it is that of what one rank holds",
        "the squares are not summed over the ranks, and each rank clips by a norm of its own"),
    "norm of a part": Cause(
        "the gradient norm alone: it is that of what the ranks at one coordinate of the mesh hold",
        "the squares are not summed over this dimension of the mesh, and the clipping is too weak"),
    "norm": Cause(
        "the gradient norm alone, by no such factor",
        "it is computed too early, or from something other than the gradients"),
    # ------------------------------------------------------------------------------------------- the update
    "not updated": Cause(
        "the weights alone: some are as before the update",
        "they are not in the optimizer, or not gathered after the update"),
    "weights drift": Cause(
        "the weights alone: copies of a weight differ between ranks, though their gradients are alike",
        "some ranks update differently: with another learning rate, other clipping, or optimizer states of their own"),
    "own weights": Cause(
        "the weights alone: the update is right, but added to the weights that the layout drew itself",
        "the optimizer keeps copies of the weights, such as float32 masters; renew them in the adapter's loaded()"),
    "decay": Cause(
        "the weights alone: off by a multiple of themselves",
        "weight decay has another coefficient, or is applied to the wrong parameters"),
    "update times a factor": Cause(
        "the weights alone: they have moved c times as far as they should",
        "another learning rate, or the clipping uses another norm"),
    "update": Cause(
        "the weights alone, in any other way",
        "the update itself: clipping by another norm, states of the optimizer, or weights that are not gathered"),
    # ------------------------------------------------------------------------------------------- the start
    "copies at the start": Cause(
        "the weights that the layout draws itself: parts of a matrix, or layers, are copies of each other",
        "ranks draw their parts from the same seed, and stay copies: the model is smaller than it seems"),
}


def table():
    return "".join(["| what differs first | what it usually means |\n|---|---|\n",
                    *(f"| {cause.looks} | {cause.means} |\n" for cause in CAUSES.values())])
