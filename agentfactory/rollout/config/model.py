"""The recipe's section model."""

from typing import Literal

from pydantic import ConfigDict, Field, field_validator

from agentfactory.base.config import PositiveInt, Section
from agentfactory.base.errors import SettingError


class LoraConfig(Section):
    """A low-rank adapter (LoRA, Hu et al., 2021, arXiv:2106.09685) on a frozen base, created with peft. Training can
    continue an adapter: that of the stage before, or of `from`. Fields that are left out then have its values."""

    model_config = ConfigDict(serialize_by_alias=True)

    rank: PositiveInt
    """Inner dimension of the two factors. Required for a new adapter."""
    alpha: float | None = Field(default=None, gt=0)
    """The adapter's output is scaled by alpha / rank. Null: 2 x rank."""
    target_modules: str | list[str] = "all-linear"
    """Linear modules that get an adapter: all-linear, a list of names, or a regular expression that matches full module
    names. In a multimodal model, all-linear covers only the language model, unless train.vision is trained."""
    trainable_tokens: Literal["auto"] | list[str] | None = None
    """Tokens whose rows of head and embedding are trained, too. auto: the tokens of the format that the network cannot
    tell from others, because they were never trained. Null: none; such tokens are then refused."""
    quantization: Literal["nf4"] | None = None
    """QLoRA (arXiv:2305.14314): store the base model at four bits per weight during training. Needs bitsandbytes, and
    either a single process or ddp."""
    from_: str | None = Field(default=None, alias="from")
    """Adapter to continue: a folder written by peft, or a checkpoint of another run that trained an adapter on
    `model.path`. A later stage continues the adapter of the stage before."""
    merge: bool | None = None
    """Merge the adapter of `from` or of the stage before into the base first, and train a new one. Null: only if they
    differ in rank, alpha or target_modules."""

    @field_validator("target_modules")
    @classmethod
    def _names_some(cls, targets: str | list[str]) -> str | list[str]:
        if not targets:
            raise SettingError("", f"got {targets!r}: no module would get an adapter", "use all-linear, or names")
        return targets


class ModelConfig(Section):
    """The policy's network, tokenizer and chat template."""

    path: str
    """Hub name or folder of a causal language model in the transformers format."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the forward pass in the trainer and the server. auto: float32 or bfloat16, whichever this machine
    computes faster in, measured once; bfloat16 if placement.gpu_memory_gib plans for a GPU. The run's recipe has the
    result."""
    chat_template: str | None = None
    """File with a Jinja chat template, used instead of the tokenizer's own."""
    lora: LoraConfig | None = None
    """Train an adapter. Null: train every weight."""
    min_image_pixels: PositiveInt | None = None
    """Smallest area of an image, in pixels; smaller images are enlarged. Null: the default of the model's processor."""
    max_image_pixels: PositiveInt | None = None
    """Largest area of an image, in pixels; larger images are reduced. Each block of 28 x 28 (Qwen2.5-VL, GLM-4.1V) or
    32 x 32 pixels (Qwen3-VL) becomes one token. Processors that cut images into tiles may enlarge them again. Null: the
    default of the model's processor."""
