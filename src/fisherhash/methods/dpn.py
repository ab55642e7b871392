"""Deep Polarized Network (Fan, Ng, Ju, Zhang, Chan, IJCAI 2020)."""

from typing import Annotated

from torch import Tensor, nn

from fisherhash.methods._codebooks import far_apart
from fisherhash.methods._options import Positive, Tuned
from fisherhash.methods._pairs import class_proportions
from fisherhash.methods.base import Batch, HashMethod, MethodInfo, register


@register
class DPN(HashMethod):
    """Deep Polarized Network: a hinge per bit pushes logits to the right side, a margin from zero.

    With u_i the K logits of image i and t_c in {-1, 1}^K the fixed target code of class c, the
    paper's polarisation loss is

        (1/N) sum_i sum_k max(0, m - t_(y_i)k u_ik).

    With several labels, it is the mean of this sum over the image's labels. The code is sgn(u).

    What differs from the paper and the authors' code:

    * Targets come from a Hadamard matrix or a search for the largest minimum distance. The authors'
      default is the signs of Gaussian draws, with which two classes may be close.
    * Over several labels we take the mean where the authors take the sum: an image with many labels
      would otherwise count more.
    * Targets stay fixed, as in the authors' default. The paper's update of targets to class means,
      and its ternary codes (|u| < m counts as unknown) at query time, are left out.
    * An image without a label adds nothing.

    Args:
        bits: K.
        classes: M.
        margin: m, 1 in the paper and in the authors' code.
        codebook_seed: Selects the targets.
    """

    info = MethodInfo(
        name="dpn",
        title="Deep Polarized Network for Supervised Learning of Accurate Binary Hashing Codes",
        venue="IJCAI",
        year=2020,
        url="https://www.ijcai.org/proceedings/2020/115",
        supervision="classes",
    )

    codebook = "targets"

    margin: Annotated[Positive, Tuned(0.2, 4.0, "log")] = 1.0
    codebook_seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.targets = nn.Buffer(far_apart(self.classes, self.bits, seed=self.codebook_seed))

    def class_centers(self) -> Tensor:
        """Return the fixed targets."""
        return self.targets

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the hinge to each of an image's targets, averaged over its labels."""
        u = outputs.float()
        shares = class_proportions(batch.labels.float())
        # A bit has two possible hinges, each weighted by the share of labels that want it.
        wanted = shares @ self.targets.clamp_min(0.0)
        unwanted = shares @ (-self.targets).clamp_min(0.0)
        hinges = wanted * (self.margin - u).relu() + unwanted * (self.margin + u).relu()
        return {"loss": hinges.sum(1).mean()}
