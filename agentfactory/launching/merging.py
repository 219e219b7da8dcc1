"""Merge an adapter into its base, for an export or a run. A run's child is `python -m agentfactory.launching.merging
ADAPTER BASE DTYPE OUTPUT`; only it imports torch."""

import json
import shutil
import sys
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentfactory.base.errors import SettingError
from agentfactory.base.files.disk import filled
from agentfactory.base.files.untrusted_files import read_json
from agentfactory.base.processes import parent_watch
from agentfactory.base.user_code.import_path import own_python
from agentfactory.launching.run_folder import ADAPTER
from agentfactory.recipe.composition import display
from agentfactory.rollout.inference.adapter_config import WEIGHTS
from agentfactory.trainers.checkpoints.checkpoint_folder import DIGESTS, INFO, DamagedCheckpointError, digest, verify

if TYPE_CHECKING:
    from agentfactory.launching.child_processes import Children

ONLY_FOR_TRAINING = (INFO, DIGESTS, "training_state", "training_state.pt")
"""Files of a checkpoint that a model does not need. training_state.pt: in checkpoints of version 0.1."""
_ORIGIN = "merged_from.json"
_TOLERANCE = 1e-3
"""Largest mean change of log-probabilities in float32 that is taken for rounding: 1e-5 at 0.5 billion parameters."""


@dataclass(frozen=True)
class Merge:
    """The merge of an adapter that precedes a run or stage, whose `model.path` is then the folder `output`."""

    adapter: Path
    base: str
    dtype: str
    output: Path
    reason: str = ""

    @property
    def is_done(self) -> bool:
        return self.output.exists()

    def describe(self) -> str:
        because = f" ({self.reason})" if self.reason else ""
        done = f"was merged into {self.base}" if self.is_done else f"is first merged into {self.base}"
        return f"the adapter in {display(self.adapter)} {done}, in {display(self.output)}{because}"

    def check(self) -> None:
        """Raise SettingError if the merged model was made from another adapter or base."""
        if not self.is_done or not (self.adapter / WEIGHTS).is_file():
            return
        try:
            made = read_json(self.output / _ORIGIN, self.output)
        except (OSError, ValueError) as error:
            problem = f"{display(self.output)} cannot be read: {error}"
            raise SettingError("model.path", problem, f"delete {display(self.output)}", source="--resume") from None
        now = _origin(self.adapter, self.base)
        # a run that was moved has another path to a base within it
        if made.get("adapter_sha256") != now["adapter_sha256"]:
            field, problem = "model.lora.from", f"{display(self.adapter)} is not the adapter"
        elif Path(str(made.get("base"))).name != Path(self.base).name:
            field, problem = "model.path", f"{self.base} is not the base"
        else:
            return
        fix = "set it back, or begin another run with output=OTHER"
        raise SettingError(field, f"{problem} that {display(self.output)} was merged from", fix, source="--resume")

    def run(self, children: "Children", log: Path, say: Callable[[str], None]) -> None:
        """Merge in a child process, unless it is done. Raises ChildFailed."""
        if self.is_done:
            return
        say(f"merging the adapter in {display(self.adapter)} into {self.base}")
        arguments = (str(self.adapter), self.base, self.dtype, str(self.output))
        command = own_python("-m", "agentfactory.launching.merging", *arguments)
        child = children.start("merge of the adapter", command, log)
        children.wait(child)
        say(child.tail(1)[0])


def merge_adapter(adapter: Path, base: str, dtype: str, output: Path) -> str:
    """Merge the LoRA adapter in a folder into its base, and write the model to the existing folder `output`: the sum in
    float32, rounded once to `dtype`. Return a sentence about the rounding. Raises SettingError if no merge reproduces
    the adapter, and the errors of transformers, peft and safetensors."""
    import torch
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer
    from transformers import AutoConfig

    from agentfactory.rollout.images.families import copy_processor
    from agentfactory.trainers.networks.lora import tie_equal, untie
    from agentfactory.trainers.networks.network import class_of, proof_rows

    # AutoPeftModelForCausalLM would cut the embeddings to the tokenizer's length
    network = class_of(AutoConfig.from_pretrained(base, trust_remote_code=False)).from_pretrained(
        base, dtype=torch.float32, trust_remote_code=False
    )
    is_tied = untie(network)
    model: Any = PeftModel.from_pretrained(network, adapter)
    rounded_to: torch.dtype = getattr(torch, dtype)
    change = lost = 0.0
    tokens = min(proof_rows(network), key=len)[None]

    def scores() -> torch.Tensor:
        return model(tokens, use_cache=False).logits.log_softmax(-1)

    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", "All adapters are already merged")
        model.eval()
        unmerged = scores()
        for layer in model.modules():
            weight = getattr(layer.get_base_layer(), "weight", None) if isinstance(layer, LoraLayer) else None
            if weight is not None:
                before = weight.clone()
                layer.merge(safe_merge=True)
                after = layer.get_base_layer().weight
                change += float((after - before).double().square().sum())
                lost += float((after.to(rounded_to).float() - after).double().square().sum())
        model = model.merge_and_unload(safe_merge=True)
        if (error := float((scores() - unmerged).abs().mean())) > _TOLERANCE:
            what = f"merged, it changes log-probabilities by {error:.2g} on average"
            problem = f"{display(adapter)} cannot be merged exactly: {what}"
            raise SettingError("model.lora.from", problem, "train another adapter")
    if is_tied:
        tie_equal(model)
    model.to(rounded_to).save_pretrained(output)
    copy_processor(base, output)
    if not lost or not change:
        return f"merged in {dtype}"
    share = (lost / change) ** 0.5
    return f"merged in float32; rounding to {dtype} moves these weights by {share:.1%} of what the adapter does"


def copy_files(checkpoint: Path, names: Iterable[str], output: Path, leave_out: Collection[str]) -> None:
    """Copy these files of a checkpoint, but none of `leave_out`, or of a folder in it."""
    for name in names:
        if Path(name).parts[0] not in leave_out:
            (output / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkpoint / name, output / name, follow_symlinks=False)


def _origin(adapter: Path, base: str) -> dict[str, str]:
    return {"adapter": str(adapter), "adapter_sha256": digest(adapter / WEIGHTS), "base": base}


def _merge_for_run(adapter: Path, base: str, dtype: str, output: Path) -> str:
    """Write the merged model with the tokenizer of the checkpoint `adapter`, or of `base` if it is not one of ours."""
    with filled(output) as aside:
        if (adapter / INFO).is_file():
            copy_files(adapter, verify(adapter), aside, (*ONLY_FOR_TRAINING, ADAPTER, WEIGHTS))
        else:
            from agentfactory.rollout.text.tokenizer import load_tokenizer

            load_tokenizer(base).save_pretrained(aside)
        said = merge_adapter(adapter, base, dtype, aside)
        (aside / _ORIGIN).write_text(json.dumps(_origin(adapter, base), indent=2) + "\n", encoding="utf-8")
    return said


if __name__ == "__main__":
    parent_watch.follow_parent()
    try:
        print(_merge_for_run(Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4])))
    except (SettingError, DamagedCheckpointError) as failure:
        sys.exit(str(failure))
