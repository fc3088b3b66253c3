"""Vision-language models from Hugging Face: their families, their loading, and chats as token ids and pictures.

Training and inference write a chat by the same code here, so a prompt has the same ids in both. A family says how a
chat is written for its models and where their parts are; a new one is a line here and a template in `prompts/chat`.

Left out: several pictures of one prompt in an order of their own beyond the text's, and video.
"""

from __future__ import annotations

import functools
import hashlib
import re
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from samrag.errors import UserError
from samrag.files import read_json
from samrag.images import read_image
from samrag.prompts.render import content_parts
from samrag.schema import ChatMessage

if TYPE_CHECKING:
    from transformers import PreTrainedModel, ProcessorMixin

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
HUB_FILES = ("*.json", "*.jinja", "*.safetensors", "tokenizer.model", "merges.txt")
RESPONSE_KEY = '"Response"'
_TEXT_FEATURES = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


# --- families ---


@dataclass(frozen=True, slots=True)
class Family:
    """Models that share a chat format and the names of their parts."""

    name: str
    model_types: tuple[str, ...]
    """`model_type` of their configurations."""
    language_model: str
    """Path of the language model inside the model, as a regular expression; so for the others."""
    vision_tower: str
    projector: str

    @property
    def chat_template(self) -> str:
        """samrag's own: the reply ends with a stop token inside the generation mark, and parts keep their order."""
        return (resources.files("samrag") / "prompts" / "chat" / f"{self.name}.jinja").read_text(encoding="utf-8")


FAMILIES = (
    Family("llava", ("llava", "llava_next"), "language_model", "vision_tower", "multi_modal_projector"),
    Family(
        "qwen_vl",
        ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
        "language_model",
        r"visual\.(blocks|patch_embed)",
        r"visual\.(merger|deepstack_merger_list)",
    ),
    Family("idefics3", ("idefics3", "smolvlm"), "text_model", "vision_model", "connector"),
    Family("internvl", ("internvl",), "language_model", "vision_tower", "multi_modal_projector"),
)


def family_of(config: Any) -> Family:
    """The family of a model by its configuration.

    Raises:
        UserError: none of ours.
    """
    for family in FAMILIES:
        if config.model_type in family.model_types:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise UserError(f"a model of type {config.model_type!r} is not known; the types known are {known}.")


# --- loading ---


def model_folder(name: str) -> Path:
    """Folder of a model; a hub name is downloaded.

    Raises:
        UserError: neither a folder nor a model on the hub.
    """
    path = Path(name)
    if path.is_dir():
        return path
    if path.exists() or not HUB_NAME.fullmatch(name):
        raise UserError(f"the model {name!r} is no folder; check model_path, or give a hub name (owner/name).")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"the model {name!r} is no folder, and the hub did not give it ({type(error).__name__}); "
            "check the name and the network, or give a folder."
        ) from error


def model_fingerprint(folder: Path) -> str:
    """Hash of a model's configuration and weights; of large files, 64 KiB in every 16 MiB."""
    step, sample = 16 << 20, 64 << 10
    digest = hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as handle:
            if size <= step:
                digest.update(handle.read())
                continue
            for offset in range(0, size, step):
                handle.seek(offset)
                digest.update(handle.read(sample))
    return digest.hexdigest()[:16]


def load_processor(folder: Path) -> ProcessorMixin:
    """The processor in a folder; images are preprocessed by PIL, the same with and without torchvision.

    A processor's video half, which needs torchvision, is left out where torchvision is missing.

    Raises:
        UserError: there is none of text and images.
    """
    from transformers import AutoProcessor, ProcessorMixin
    from transformers.utils import is_torchvision_available

    wanted: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False, "backend": "pil"}
    hint = f"{folder} has no usable processor (tokenizer and image processor); save its model's processor there"
    try:
        loader: Any = None if is_torchvision_available() else _without_video(folder)
        processor = (loader or AutoProcessor).from_pretrained(folder, **wanted)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise UserError(f"{hint}: {first_line(error)}") from error
    if not isinstance(processor, ProcessorMixin) or not hasattr(processor, "image_processor"):
        raise UserError(f"{hint}; found only a {type(processor).__name__}.")
    return processor


def _without_video(folder: Path) -> type[ProcessorMixin] | None:
    """The class of a folder's processor without its video half; None when it has none."""
    import transformers

    names = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
    found = (read_json(folder / name).get("processor_class") for name in names if (folder / name).is_file())
    parent = getattr(transformers, next(filter(None, found), ""), None)
    if parent is None or "video_processor" not in parent.get_attributes():
        return None
    parts = [name for name in parent.get_attributes() if name != "video_processor"]
    return type(parent.__name__, (parent,), {"get_attributes": classmethod(lambda cls: parts)})


def load_model(folder: Path, dtype: str = "float32", **options: Any) -> PreTrainedModel:
    """The model in a folder, of safetensors alone; nothing is downloaded and no code from there is run.

    Args:
        folder: of the model.
        dtype: type of the weights in memory, such as `bfloat16`.
        options: more for `from_pretrained`, such as `quantization_config`.

    Raises:
        UserError: it cannot be loaded, or lacks weights.
    """
    from transformers import AutoModelForImageTextToText

    try:
        model, loading = AutoModelForImageTextToText.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype=getattr(torch, dtype),
            output_loading_info=True, **options,
        )  # fmt: skip
    except (OSError, ValueError, KeyError, RuntimeError, AttributeError) as error:
        raise UserError(f"{folder} could not be loaded as a vision-language model: {first_line(error)}") from error
    if loading["missing_keys"]:
        raise UserError(f"{folder} lacks weights, {sorted(loading['missing_keys'])[0]} among them; download it again.")
    return model


def load_adapter(model: PreTrainedModel, folder: Path) -> Any:
    """Put an adapter on a model; every one of its tensors must have its place, and every place its tensor.

    Raises:
        UserError: it is no adapter folder, or does not fit the model.
    """
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors import SafetensorError, safe_open

    weights = folder / "adapter_model.safetensors"
    if not weights.is_file() or not (folder / "adapter_config.json").is_file():
        raise UserError(f"{folder} is no adapter folder: adapter_config.json or {weights.name} is missing.")
    try:
        with safe_open(weights, "pt") as file:
            stored = set(file.keys())
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Found missing adapter keys")  # an error below
            peft_model = PeftModel.from_pretrained(model, folder, is_trainable=False, local_files_only=True).eval()
    except (ValueError, RuntimeError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(f"the adapter in {folder} does not fit the model: {str(error)[:300]}") from error
    if peft_model.active_peft_config.is_prompt_learning:
        raise UserError(f"the adapter in {folder} is a learnt prompt; only adapters inside the layers (LoRA) are run.")
    wanted = set(get_peft_model_state_dict(peft_model, save_embedding_layers=False))
    for what, names in (("lacks", wanted - stored), ("has, without a place in the model,", stored - wanted)):
        if names:
            raise UserError(
                f"the adapter in {folder} {what} {len(names)} tensors, such as {min(names)}; it was made for another"
                " model or another version of peft."
            )
    return peft_model


def first_line(error: BaseException) -> str:
    """The first line of what an error says."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


# --- chats ---


@dataclass(frozen=True, slots=True)
class Picture:
    """A preprocessed image: what stands for it in the prompt, and the tensors that go with it."""

    tokens: list[int]
    tensors: dict[str, Tensor]
    """By the model's argument; each begins with a dimension along which pictures are joined."""

    @property
    def shapes(self) -> tuple[tuple[str, torch.Size], ...]:
        """Pictures of equal shapes can be joined without padding."""
        return tuple((name, value.shape) for name, value in sorted(self.tensors.items()))


def join(pictures: Sequence[Picture]) -> dict[str, Tensor]:
    """The model's arguments for several pictures; where they differ in size (tiles), zeros fill up."""
    joined = {}
    for name in pictures[0].tensors if pictures else ():
        tensors = [picture.tensors[name] for picture in pictures]
        sizes = [max(tensor.shape[axis] for tensor in tensors) for axis in range(1, tensors[0].dim())]
        if any(list(tensor.shape[1:]) != sizes for tensor in tensors):
            padding = [[size - given for given, size in zip(t.shape[1:], sizes, strict=True)] for t in tensors]
            tensors = [
                torch.nn.functional.pad(t, [x for amount in reversed(pad) for x in (0, amount)])
                for t, pad in zip(tensors, padding, strict=True)
            ]
        joined[name] = torch.cat(tensors)
    return joined


class ChatProcessor:
    """Chats to token ids, images to pictures, and token ids back to text.

    Pictures are kept as uint8 before normalisation, a quarter of the memory, when that gives the processor's own values
    back (checked on the first); otherwise as they are.
    """

    def __init__(self, processor: ProcessorMixin, max_image_bytes: int = 1 << 30, keep_first: bool = False) -> None:
        """Keep the parts.

        Args:
            processor: With a chat template.
            max_image_bytes: Memory for preprocessed images.
            keep_first: When the memory is full, keep the images that came first, which serves repeated passes over the
                same rows, instead of those used last.

        Raises:
            UserError: the processor has no chat template, or no image token.
        """
        if not processor.chat_template:
            raise UserError("the processor has no chat template; put a chat_template.jinja into its folder.")
        if not getattr(processor, "image_token", None):
            raise UserError("the processor names no image token; serve the model and use engine api.")
        self.processor = processor
        self.tokenizer: Any = processor.tokenizer
        self.image_token: str = processor.image_token
        self.image_token_id: int = self.tokenizer.convert_tokens_to_ids(self.image_token)
        self._marks_types = bool(getattr(processor, "return_mm_token_type_ids", False))
        self._keep_first = keep_first
        self._free_bytes = max_image_bytes
        self._kept: OrderedDict[tuple[Path, int, int], tuple[Picture, bool]] = OrderedDict()
        self._affine: tuple[Tensor, Tensor] | None = None
        self._probed = False

    @classmethod
    def load(cls, folder: Path, template: str | None = None, **options: Any) -> ChatProcessor:
        """Load a processor; `template` takes the place of its own chat template."""
        processor = load_processor(folder)
        if template is not None:
            processor.chat_template = template
        return cls(processor, **options)

    def text(self, messages: Sequence[ChatMessage], open_reply: bool = True) -> str:
        """A chat in the model's format; `open_reply` leaves it open for the model's reply."""
        turns = [{"role": message.role, "content": content_parts(message.content)} for message in messages]
        rendered = self.processor.apply_chat_template(turns, add_generation_prompt=open_reply, tokenize=False)
        return str(rendered)

    def encode(self, texts: Sequence[str], pictures: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
        """Tokens of chats' texts, each begun by BOS once, with the tokens of each one's pictures at their places.

        Raises:
            ValueError: a text has places for another number of pictures.
        """
        bos = self.tokenizer.bos_token
        with_bos = bos is None or all(text.startswith(bos) for text in texts)  # all are of one template
        encoded: list[list[int]] = (
            self.tokenizer(list(texts), add_special_tokens=not with_bos)["input_ids"] if texts else []
        )
        for tokens, own in zip(encoded, pictures, strict=True):
            places = [place for place, token in enumerate(tokens) if token == self.image_token_id]
            if len(places) != len(own):
                raise ValueError(f"{len(places)} places for {len(own)} pictures")
            for place, picture in reversed(list(zip(places, own, strict=True))):
                tokens[place : place + 1] = picture
        return encoded

    def encode_replies(self, chats: Sequence[Sequence[ChatMessage]]) -> list[list[int]]:
        """Tokens of each chat's last turn, stop token included, as they follow its open prompt."""
        return [tokens for tokens, _ in self.encode_targets(chats)]

    def encode_targets(self, chats: Sequence[Sequence[ChatMessage]]) -> list[tuple[list[int], int]]:
        """As `encode_replies`, and for each the index of the token with which its response begins.

        That is the key "Response" of the contract; 0 where the reply has none.
        """
        replies = []
        for messages in chats:
            whole, prompt = self.text(messages, open_reply=False), self.text(messages[:-1])
            if not whole.startswith(prompt):
                raise ValueError(
                    "the chat template writes an open prompt and the beginning of a whole chat differently"
                )
            replies.append(whole[len(prompt) :])
        if not replies:
            return []
        encoded = self.tokenizer(replies, add_special_tokens=False, return_offsets_mapping=True)
        begins = [max(0, reply.rfind(RESPONSE_KEY)) for reply in replies]
        return [
            (tokens, next(i for i, (_, end) in enumerate(offsets) if end > begin))
            for tokens, offsets, begin in zip(encoded["input_ids"], encoded["offset_mapping"], begins, strict=True)
        ]

    def reference(self, messages: Sequence[ChatMessage], paths: Sequence[Path]) -> list[int]:
        """Tokens of an open prompt as the processor itself makes them in one step: what `encode` must equal."""
        waiting = iter(paths)
        turns = [
            {
                "role": message.role,
                "content": [
                    {"type": "image", "image": read_image(next(waiting))} if part["type"] == "image" else part
                    for part in content_parts(message.content)
                ],
            }
            for message in messages
        ]
        output = self.processor.apply_chat_template(turns, tokenize=True, add_generation_prompt=True, return_dict=True)
        return [int(token) for token in output["input_ids"][0]]

    def picture_tokens(self, path: Path) -> list[int]:
        """What stands for an image in a prompt; the image is then preprocessed. Raises what `read_image` raises."""
        return self._found(path)[0].tokens

    def picture(self, path: Path) -> Picture:
        """Preprocess an image, or find it preprocessed. Raises what `read_image` raises."""
        picture, is_raw = self._found(path)
        if not is_raw:
            return picture
        assert self._affine is not None
        scale, shift = self._affine
        pixels = picture.tensors["pixel_values"] * scale + shift
        return Picture(picture.tokens, {**picture.tensors, "pixel_values": pixels})

    def inputs(self, input_ids: Tensor, attention_mask: Tensor, pictures: Sequence[Picture]) -> dict[str, Tensor]:
        """The model's arguments for padded rows: input_ids[B, T], attention_mask[B, T], and their pictures' tensors."""
        batch = {"input_ids": input_ids, "attention_mask": attention_mask, **join(pictures)}
        if self._marks_types:
            batch["mm_token_type_ids"] = (input_ids == self.image_token_id).long()
        return batch

    @functools.cached_property
    def closing(self) -> Tensor:
        """closing[V]: whether a token's text has the brace that may end a JSON object."""
        tokens = self.tokenizer.convert_ids_to_tokens(list(range(len(self.tokenizer))))
        return torch.tensor(["}" in (token or "") for token in tokens])

    @functools.cached_property
    def stop_token_id(self) -> int:
        """The token that ends a reply in the chat template's format."""
        (closed,) = self.encode_replies([(ChatMessage("user", "a"), ChatMessage("assistant", "b"))])
        special = set(self.tokenizer.all_special_ids)
        if not closed or closed[-1] not in special:
            raise UserError("the chat template does not end a reply with a special token, so no end would be learnt.")
        return closed[-1]

    @property
    def pad_token_id(self) -> int:
        """For padding; the mask hides it."""
        pad = self.tokenizer.pad_token_id
        return int(self.tokenizer.eos_token_id or 0) if pad is None else int(pad)

    def decode(self, tokens: Sequence[int]) -> str:
        """New tokens as text."""
        text = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text).strip()

    def _found(self, path: Path) -> tuple[Picture, bool]:
        """A picture, and whether its pixels are raw."""
        status = path.stat()
        version = (path, status.st_mtime_ns, status.st_size)
        found = self._kept.get(version)
        if found is None:
            found = self._preprocessed(path)
            self._keep(version, found)
        else:
            self._kept.move_to_end(version)
        return found

    def _keep(self, version: tuple[Path, int, int], found: tuple[Picture, bool]) -> None:
        size = _num_bytes(found[0])
        while not self._keep_first and size > self._free_bytes and self._kept:
            self._free_bytes += _num_bytes(self._kept.popitem(last=False)[1][0])
        if size <= self._free_bytes:
            self._free_bytes -= size
            self._kept[version] = found

    def _preprocessed(self, path: Path) -> tuple[Picture, bool]:
        image = read_image(path)
        if not self._probed:
            self._probed = True
            self._affine = self._find_affine(image)
        raw = self._affine is not None
        features = self._features(image, raw)
        if raw and not bool(features.get("pixel_attention_mask", torch.ones(1)).all()):  # padding is not rescaled
            raw, features = False, self._features(image, False)
        tokens = features["input_ids"][0].tolist()
        if self.tokenizer.bos_token_id is not None and tokens[0] == self.tokenizer.bos_token_id:
            tokens = tokens[1:]
        if self.tokenizer.eos_token_id is not None and tokens[-1] == self.tokenizer.eos_token_id:
            tokens = tokens[:-1]
        tensors = {name: value for name, value in features.items() if name not in _TEXT_FEATURES}
        if raw:
            tensors["pixel_values"] = tensors["pixel_values"].to(torch.uint8)
        return Picture(tokens, tensors), raw

    def _features(self, image: Any, raw: bool) -> dict[str, Tensor]:
        options = {"images_kwargs": {"do_rescale": False, "do_normalize": False}} if raw else {}
        return dict(self.processor(text=[self.image_token], images=[image], return_tensors="pt", **options))

    def _find_affine(self, image: Any) -> tuple[Tensor, Tensor] | None:
        """(scale, shift) from raw to normalised pixel values; None when the processor does something else."""
        settings = self.processor.image_processor
        if not (getattr(settings, "do_normalize", False) and getattr(settings, "do_rescale", False)):
            return None
        wanted, raw = (self._features(image, each)["pixel_values"] for each in (False, True))
        mean, std = (torch.tensor(values) for values in (settings.image_mean, settings.image_std))
        scale, shift = settings.rescale_factor / std, -mean / std
        if wanted.dim() == 2:  # [patches, channels x values], channels first (Qwen)
            scale, shift = (v.repeat_interleave(wanted.shape[1] // len(mean)) for v in (scale, shift))
        else:  # [..., C, H, W]
            scale, shift = (v.view(-1, 1, 1) for v in (scale, shift))
        if raw.shape != wanted.shape or not torch.equal(raw, raw.to(torch.uint8).to(raw.dtype)):
            return None
        return (scale, shift) if torch.allclose(raw * scale + shift, wanted, atol=1e-5) else None


def _num_bytes(picture: Picture) -> int:
    return sum(tensor.nbytes for tensor in picture.tensors.values())
