"""Argument groups of the stage scripts: what to do, never on which hardware. Imports no model stack.

The trainers' groups lie beside them (`samrag.training.*_arguments`), the report's in `samrag.report.arguments`.
"""

from __future__ import annotations

import re
from dataclasses import field
from typing import Literal

from pydantic.dataclasses import dataclass

from samrag.config import STRICT
from samrag.programs.climb import Assessment, Rejection
from samrag.programs.sam_rag import Exhausted, ImageJudgement
from samrag.programs.verdicts import VerdictMode
from samrag.schema import Language


def _at_least(group: object, minimum: float, *names: str) -> None:
    """Refuse numbers, or lists of them, below a minimum; None means that the field is not set."""
    for name in names:
        value = getattr(group, name)
        for number in value if isinstance(value, list) else [value]:
            if number is not None and number < minimum:
                raise ValueError(f"{name} is {number}; it must be at least {minimum:g}")


@dataclass(config=STRICT)
class MiniWorldArguments:
    """How large a mini world to write."""

    output_dir: str
    """Folder of the world's files."""
    train_clubs: int = 230
    """Clubs in the train split."""
    train_questions: int = 200
    """Questions in the train split."""
    dev_clubs: int = 120
    """Clubs in the dev split."""
    dev_questions: int = 210
    """Questions in the dev split."""
    test_clubs: int = 60
    """Clubs in the test split."""
    test_questions: int = 60
    """Questions in the test split."""
    seed: int = 0
    """Seed of everything that is drawn."""


@dataclass(config=STRICT)
class PrepareArguments:
    """Which questions and documents to take from a raw data set."""

    data_dir: str
    """mmqa: folder with MMQA_<split>.jsonl[.gz], MMQA_texts.jsonl[.gz] and MMQA_images.jsonl[.gz]; folder: your own
    files, laid out as samrag/benchmarks/folder.py says."""
    output_dir: str
    """Folder for questions.jsonl, documents.jsonl and quarantine.jsonl of each split."""
    benchmark: Literal["mmqa", "folder"] = "mmqa"
    """The raw data set's format: MultiModalQA's, or your own files."""
    splits: list[str] = field(default_factory=lambda: ["train", "dev"])
    """Splits to prepare."""
    question_types: list[str] | None = None
    """Question types to keep; none is the paper's two (TextQ, ImageQ) for mmqa, and all for folder."""
    corpus: Literal["selected", "split"] = "selected"
    """mmqa: documents listed by the kept questions, or by all questions of the split. A folder is taken whole."""
    image_root: str | None = None
    """mmqa: folder of the image files; given, every image of the corpus is decoded once and must be whole."""
    missing_texts: Literal["error", "drop"] = "error"
    """mmqa, without MMQA_texts: stop, or keep images only and drop the questions that need a text."""
    on_bad: Literal["error", "quarantine"] = "error"
    """An item that cannot be used: stop and name it, or leave it out and write it to quarantine.jsonl."""
    animated: Literal["refuse", "first_frame"] = "refuse"
    """Animated images and files of several pages: bad items, or taken by their first frame."""
    split_shares: list[float] = field(default_factory=lambda: [0.8, 0.2])
    """folder, questions without a split: share of each of `splits`."""
    seed: int = 0
    """folder: seed of the draw that deals questions to splits."""


@dataclass(config=STRICT)
class DownloadArguments:
    """Which images of interleaved questions to fetch, and how patiently."""

    data_files: list[str]
    """Files of RAG-IGBench (samrag/benchmarks/rag_igbench.py)."""
    image_root: str
    """Folder for the images; their names depend on their URLs alone."""
    output_dir: str
    """Folder for downloads.jsonl, what became of every URL, and dead_links.jsonl, those that gave no image."""
    concurrency: int = 16
    """Images fetched at once."""
    max_attempts: int = 4
    """Attempts per image; what the server says is gone is not tried again."""
    timeout_s: float = 30.0
    """Seconds without a sign of the server that end an attempt."""
    backoff_s: float = 1.0
    """Seconds before the second attempt; twice as many before each further one."""
    max_file_mb: float = 20.0
    """Megabytes of an image file at most."""
    retry_dead: bool = False
    """Also ask for what a former run found dead or unusable."""
    on_bad: Literal["error", "quarantine"] = "error"
    """A line that cannot be used: stop and name it, or leave it out and write it to quarantine.jsonl."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "concurrency", "max_attempts")
        _at_least(self, 0.001, "timeout_s", "max_file_mb")
        _at_least(self, 0, "backoff_s")


@dataclass(config=STRICT)
class TeacherArguments:
    """The teacher G: any OpenAI-compatible server."""

    store: str
    """Call store (SQLite): every reply is kept there, and paid once."""
    teacher_model: str = "gpt-4o"
    """Model name on the server."""
    teacher_url: str | None = None
    """Base URL; none takes the client's default (or OPENAI_BASE_URL)."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key."""
    concurrency: int = 32
    """Calls in flight at most; fewer while the server is overloaded."""
    requests_per_minute: int | None = None
    """Requests a minute at most; none keeps to what the server's headers say."""
    tokens_per_minute: int | None = None
    """Tokens a minute at most, prompt and length limit counted; none keeps to what the server's headers say."""
    timeout_s: float = 60.0
    """Seconds a call may take."""
    max_attempts: int = 5
    """Attempts per call; a 429 is waited out and does not count."""
    structured_output: Literal["json_schema", "vllm", "none"] = "json_schema"
    """How the server is asked to keep the reply's JSON schema: response_format, vLLM's structured_outputs, or not."""
    repair: bool = True
    """Ask once more after a reply that is invalid (showing what is wrong) or was cut (with twice the room)."""
    max_tokens_name: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """Name of the length limit in a request; newer OpenAI models want max_completion_tokens."""
    max_image_px: int = 1024
    """Longest side of an image that is sent."""
    budget_usd: float | None = None
    """Dollars this run may spend; it stops before the call that may go beyond. None is no limit."""
    price_file: str | None = None
    """YAML of prices that go before the packaged ones (samrag/engines/prices.yaml)."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "concurrency", "max_attempts", "requests_per_minute", "tokens_per_minute", "max_image_px")
        _at_least(self, 0.001, "timeout_s")
        _at_least(self, 0, "budget_usd")


@dataclass(config=STRICT)
class CaptionArguments:
    """Raw captions of image documents."""

    documents_files: list[str]
    """documents.jsonl files; the captioned copy is written beside each as documents.captioned.jsonl."""
    image_root: str
    """Folder that image paths are relative to."""
    temperature: float = 0.0
    """Temperature of the captions."""
    max_tokens: int = 300
    """Longest caption, in tokens."""
    dry_run: bool = False
    """Only say how many calls are stored, and what the others would take."""

    def __post_init__(self) -> None:
        _at_least(self, 0, "temperature")
        _at_least(self, 1, "max_tokens")


@dataclass(config=STRICT)
class BatchArguments:
    """A stage's calls through the batch endpoint: within a day, at half the price."""

    stage: Literal["caption", "distill", "interleave"]
    """The stage whose calls are asked."""
    stage_config: str
    """The stage's own YAML, as its script takes it; replies go to its store."""
    batch_dir: str
    """Folder of the batches' state and files; one for each stage and teacher."""
    max_requests: int = 50_000
    """Requests in a file at most (OpenAI: 50,000)."""
    max_file_mb: float = 200.0
    """Megabytes of a file at most (OpenAI: 200)."""
    poll_s: float = 60.0
    """Seconds between two looks at a batch."""
    wait: bool = True
    """Wait for the batches and go on with the calls that follow; false goes as far as it can now, and ends."""
    dry_run: bool = False
    """Only say what the next batches would take."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "max_requests")
        _at_least(self, 0.001, "max_file_mb", "poll_s")


@dataclass(config=STRICT)
class DistillArguments:
    """Teacher data for the student: what to ask, and what to keep."""

    questions_file: str
    """questions.jsonl of the training split."""
    documents_file: str
    """documents.jsonl (captioned)."""
    image_root: str
    """Folder that image paths are relative to; also the root of the image paths in sft.jsonl."""
    index_dir: str
    """Index over the documents: negatives come from the top of its ranking."""
    embedder: str
    """The index's embedder."""
    output_dir: str
    """Folder for sft.jsonl, dropped.jsonl and data_card.md."""
    negatives_top: int = 10
    """Negatives are drawn from this many best-ranked non-supports (the paper: 10)."""
    temperature: float = 1.2
    """Teacher temperature (the paper: 1.2)."""
    max_tokens: int = 512
    """Longest reply, in tokens."""
    num_samples: int = 3
    """Draws per item until one passes (the paper: 1)."""
    negatives_per_positive: float = 1.0
    """Negatives per positive (the paper: 1)."""
    min_negatives: int = 1
    """Negatives per question at least."""
    bridge_positives: bool = True
    """Keep supports without the answer: is_rel True, is_sup Partial."""
    multi_document: bool = True
    """Also judge contexts of several documents, as inference has them."""
    wrong_answers: int = 2
    """Wrong answers put to the judges per question (the paper: 0)."""
    refusals: bool = True
    """Also keep "not stated" replies where the content lacks the answer."""
    wrong_forms: bool = True
    """Also put the right answer to is_use in a wrong form (the paper: no)."""
    min_f1: float = 1.0
    """Least list F1 of an answer with gold; 1 asks for exact match (the paper: a match)."""
    direct_verdicts: bool = True
    """Beside each reasoned verdict, also a row with the verdict alone (the paper: no)."""
    max_class_ratio: float | None = 3.0
    """Of each kind, no class is larger than so many times the smallest; none leaves them as they are (the paper)."""
    max_questions: int | None = None
    """Questions to use; none is all."""
    question_ids: list[str] = field(default_factory=list)
    """Only these questions; empty is all. This is how quarantine.jsonl says to try an item again."""
    max_per_kind: int | None = None
    """Rows per call kind at most; none is all."""
    samples_per_group: int = 12
    """samples.html: items shown per kind, label and fate."""
    data_licence: str = "not stated"
    """Licence of the questions and documents, for the data card."""
    dry_run: bool = False
    """Only say what would be asked, and what it would cost."""
    seed: int = 0
    """Seed of every draw."""

    def __post_init__(self) -> None:
        _at_least(self, 0, "temperature", "negatives_per_positive", "min_negatives", "wrong_answers")
        _at_least(self, 1, "negatives_top", "max_tokens", "num_samples", "max_questions", "max_per_kind")
        _at_least(self, 1, "max_class_ratio", "samples_per_group")


@dataclass(config=STRICT)
class InterleaveArguments:
    """Training data for interleaved answers: a teacher drafts, a person refines, filters decide."""

    stage: Literal["draft", "rows"]
    """draft: ask the teacher, write the page. rows: read what the page exported, write the rows."""
    data_file: str
    """A file of RAG-IGBench (samrag/benchmarks/rag_igbench.py)."""
    language: Language
    """Its language: en or zh."""
    image_root: str
    """Folder of the images."""
    output_dir: str
    """Folder for drafts/drafts.jsonl and drafts/refine.html, and then for sft.jsonl and dropped.jsonl."""
    split: str | None = "train"
    """Use this split alone; none uses all."""
    max_questions: int | None = None
    """Questions to use; none is all."""
    refinement_files: list[str] = field(default_factory=list)
    """rows: the page's exports."""
    is_rel: bool = True
    """draft: judge each document's relevance; off shows all of them."""
    is_sup: bool = True
    """draft: judge whether the documents support the answer."""
    max_regenerations: int = 1
    """draft: answers drawn anew, at most, after one with bad references or without full support."""
    temperature: float = 0.0
    """draft: temperature of the first answers."""
    max_tokens: int = 2048
    """draft: longest reply, in tokens."""
    min_images: int = 1
    """rows: images of an answer at least."""
    min_citations: int = 0
    """rows: citations of an answer at least."""
    min_image_f1: float = 0.0
    """rows: least F1 of an answer's images with gold's, where there is gold; 0 asks for nothing."""
    dry_run: bool = False
    """draft: only say how many calls are stored, and what the others would take."""
    seed: int = 0
    """Seed of sampled calls."""

    def __post_init__(self) -> None:
        _at_least(self, 0, "temperature", "max_regenerations", "min_images", "min_citations", "min_image_f1")
        _at_least(self, 1, "max_tokens", "max_questions")
        if self.min_image_f1 > 1:
            raise ValueError(f"min_image_f1 is {self.min_image_f1}; it must be at most 1")


@dataclass(config=STRICT)
class ExportArguments:
    """Teacher data in the forms that other trainers read."""

    sft_file: str
    """sft.jsonl."""
    image_root: str
    """Folder that image paths are relative to."""
    output_dir: str
    """Folder for README.md and a folder of each format."""
    formats: list[str] = field(default_factory=lambda: ["trl", "llama_factory", "datasets"])
    """trl: prompt/completion JSONL. llama_factory: sharegpt JSON, dataset_info.json, a training YAML. datasets: Hugging
    Face datasets on disk."""
    name: str = "samrag"
    """Name of the data set in its card and in dataset_info.json."""
    validation_share: float = 0.05
    """Share of the questions whose rows are for validation; 0 is none."""
    separate_documents: bool = False
    """Also let no document be on both sides: training rows that show a document of validation are left out."""
    copy_images: bool = False
    """Copy the images into the export, so that it can be moved; otherwise paths stay relative to image_root."""
    push_to: str | None = None
    """Repository on the hub, owner/name, to push the datasets format to; none pushes nothing."""
    push_private: bool = True
    """A repository that is made by the push is private."""
    model_path: str = "llava-hf/llava-1.5-7b-hf"
    """Base model in the training YAML for LLaMA-Factory."""
    data_licence: str = "not stated"
    """Licence of the questions, texts and images, for the card."""
    seed: int = 0
    """Seed of the draw of validation questions."""

    def __post_init__(self) -> None:
        unknown = set(self.formats) - {"trl", "llama_factory", "datasets"}
        if unknown or not self.formats:
            raise ValueError(f"formats is {self.formats}; it must name some of trl, llama_factory, datasets")
        if not 0 <= self.validation_share < 1:
            raise ValueError(f"validation_share is {self.validation_share}; it must be at least 0 and below 1")
        if not re.fullmatch(r"[A-Za-z0-9_-]+", self.name):
            raise ValueError(f"name is {self.name!r}; it must be of letters, digits, - and _")
        if self.push_to is not None:
            if not re.fullmatch(r"[\w.-]+/[\w.-]+", self.push_to):
                raise ValueError(f"push_to is {self.push_to!r}; it must be owner/name")
            if "datasets" not in self.formats or not self.copy_images:
                raise ValueError("push_to needs the format datasets and copy_images, or readers would have no images")


@dataclass(config=STRICT)
class MergeArguments:
    """A tuned student as one model folder."""

    adapter: str
    """Folder of the adapter."""
    output_dir: str
    """Folder of the merged model."""
    model_path: str | None = None
    """Base model, a folder or a hub name; none takes the one that the adapter names."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the merged weights; below float32 they are rounded."""
    max_shard_size: str = "5GB"
    """Largest file of weights."""
    push_to: str | None = None
    """Upload the folder to this hub repository (owner/name); the hub's own login is used."""
    private: bool = True
    """Make a new repository private."""
    data_licence: str = "not stated"
    """Licence of the training data's inputs, for the model card."""


@dataclass(config=STRICT)
class MineArguments:
    """Hard negatives for the retriever."""

    questions_file: str
    """questions.jsonl of the training split."""
    documents_file: str
    """documents.jsonl (captioned)."""
    index_dir: str
    """Index over the documents."""
    embedder: str
    """The index's embedder."""
    output_dir: str
    """Folder for retriever.jsonl."""
    num_negatives: int = 10
    """Negatives per question (the paper: 10)."""
    top: int = 50
    """Drawn from this many best-ranked non-supports of each ranker (the paper: 50)."""
    relative_margin: float | None = None
    """Drop candidates that score above this share less than the best positive, for example 0.05; none drops none."""
    rankers: list[str] = field(default_factory=lambda: ["dense"])
    """Where candidates come from, in turn: dense (the index), bm25, title (the paper: dense)."""
    relabel: bool = False
    """Ask the teacher is_rel of what was drawn: a positive is promoted, a doubtful one dropped."""
    relabel_spare: int = 5
    """relabel: further negatives drawn, to take the place of those promoted or dropped."""
    relabel_votes: int = 3
    """relabel: votes on a document that the first one calls relevant; all must agree to promote it."""
    temperature: float = 0.7
    """relabel: teacher temperature."""
    max_tokens: int = 512
    """relabel: longest reply, in tokens."""
    image_root: str | None = None
    """relabel: folder that image paths are relative to."""
    max_questions: int | None = None
    """Questions to use; none is all."""
    seed: int = 0
    """Seed of the draws."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "num_negatives", "top", "relabel_votes", "max_tokens", "max_questions")
        _at_least(self, 0, "relabel_spare", "temperature")
        if self.relabel and self.image_root is None:
            raise ValueError("image_root is not set; relabel needs the folder that image paths are relative to")


@dataclass(config=STRICT)
class IndexArguments:
    """An index over documents."""

    documents_file: str
    """documents.jsonl (captioned)."""
    embedder: str
    """Embedder folder, hub name, or quickstart."""
    output_dir: str
    """Index folder."""
    max_batch_tokens: int | None = None
    """Tokens per forward pass, padding included; none takes 1,024 on a processor, 65,536 on an accelerator."""
    dtype: Literal["float32", "float16"] = "float32"
    """How components are stored: float16 takes half the place."""
    shard_size: int = 65_536
    """Documents of a file; a build that was killed goes on at the last whole file."""
    overwrite: bool = False
    """Replace an index of another embedder or dtype, or a broken one; other documents need no such leave."""
    search: Literal["exact", "ivf", "hnsw", "milvus"] = "exact"
    """How documents are looked for; ivf and hnsw (FAISS) are approximate, their recall is measured and stored."""
    num_lists: int | None = None
    """IVF: cells; none takes 4 times the root of the number of documents."""
    num_probes: int = 32
    """IVF: cells that are searched."""
    num_links: int = 32
    """HNSW: neighbours of a vector."""
    ef_construction: int = 128
    """HNSW: candidates while building."""
    ef_search: int = 128
    """HNSW: candidates while searching."""
    milvus_uri: str | None = None
    """Milvus: address of a server (its token in MILVUS_TOKEN), or a file ending in .db for Milvus Lite."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "max_batch_tokens", "shard_size", "num_lists", "num_probes", "ef_construction", "ef_search")
        _at_least(self, 2, "num_links")
        if (self.search == "milvus") != (self.milvus_uri is not None):
            raise ValueError(
                f"search is {self.search} and milvus_uri {self.milvus_uri}; milvus needs it, others do not"
            )
        if self.milvus_uri is not None and "@" in self.milvus_uri:
            raise ValueError("milvus_uri holds a secret, which would be stored; put it into MILVUS_TOKEN instead")


@dataclass(config=STRICT)
class RetrievalArguments:
    """Strict recall of rankers over one corpus."""

    questions_file: str
    """questions.jsonl with labels."""
    documents_file: str
    """documents.jsonl."""
    output_dir: str
    """Folder for retrieval.json and its table."""
    rankers: list[str] = field(default_factory=lambda: ["title", "bm25"])
    """Lexical rankers: title, bm25."""
    indexes: list[str] = field(default_factory=list)
    """Dense rankers: label=index folder=embedder, for example R=runs/index_r=quickstart."""
    fusions: list[str] = field(default_factory=list)
    """Reciprocal rank fusions of the above: label=ranker+ranker, for example fusion=BM25+R; R*2 weighs R twice."""
    reranks: list[str] = field(default_factory=list)
    """Rerankings of the above: label=ranker=cross-encoder, for example reranked=fusion=BAAI/bge-reranker-base."""
    fusion_depth: int = 100
    """Ranks of each ranker that a fusion looks at."""
    rerank_depth: int = 50
    """Documents of each question that a cross-encoder reads."""
    at: list[int] = field(default_factory=lambda: [1, 2, 5, 10])
    """The N of recall@N."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "at", "fusion_depth", "rerank_depth")


@dataclass(config=STRICT)
class LoopArguments:
    """Options of RAG, SAM-RAG and CLIMB that a run may set (see `samrag.programs`)."""

    verdict_mode: VerdictMode = VerdictMode.REASONED
    """reasoned; direct: verdicts alone, in one step; cascade: direct, and reasoned where that is not sure. The last two
    need a student that was taught direct verdicts."""
    sure: float = 0.9
    """Cascade: probability from which a direct verdict stands."""
    sure_by_kind: dict[str, float] = field(default_factory=dict)
    """Cascade: thresholds of single kinds, as inference/calibrate.py writes them."""
    k: int = 8
    """RAG: documents in the context."""
    batch_size: int = 7
    """SAM-RAG: documents judged per retrieval batch."""
    max_batches: int = 4
    """SAM-RAG: retrieval batches per question at most."""
    max_regenerations: int = 2
    """SAM-RAG: answers drawn anew after is_use False, at most."""
    regeneration_temperature: float = 0.7
    """SAM-RAG: temperature of the redrawn answers."""
    critique: bool = True
    """SAM-RAG: tell the model why its last answer was refused."""
    num_votes: int = 1
    """SAM-RAG: self-consistency votes of an answer."""
    vote_temperature: float = 0.7
    """SAM-RAG, CLIMB: temperature of the votes."""
    is_use_content: bool = True
    """SAM-RAG: show the context to is_use."""
    image_judgement: ImageJudgement = ImageJudgement.MERGED
    """SAM-RAG: merged or two_step."""
    on_exhausted: Exhausted = Exhausted.BEST
    """SAM-RAG: best, abstain, context or closed_book when no answer was verified."""
    pool_size: int = 10
    """Pools: K, documents in a pool (inferred; CLIMB's paper gives no values)."""
    num_candidates: int = 50
    """Pools: best documents of the index that a pool is chosen from (inferred)."""
    pool_strategy: Literal["mmr", "vrsd"] = "mmr"
    """Pools: mmr, or vrsd, which has no lambda."""
    pool_trade_off: float = 0.7
    """Pools, mmr: lambda; 1 is relevance alone (inferred)."""
    pool_stretched: bool = False
    """Pools, mmr: stretch each question's relevance to 0..1 first (inferred: no)."""
    evidence_size: int = 4
    """CLIMB: M, passages that an answer is drawn from (inferred)."""
    u_star: float = 0.9
    """CLIMB: U_STAR, the confidence at which refinement stops (inferred)."""
    t_max: int = 3
    """CLIMB: T_max, rounds of refinement at most (inferred)."""
    min_gain: float = 0.0
    """CLIMB: the confidence has to rise by more than this."""
    facet_weight: float = 0.5
    """CLIMB: weight of a passage's nearness to the missing facet beside its score (inferred)."""
    facet_similarity: Literal["words", "embedder"] = "words"
    """CLIMB: nearness to a facet by shared words, or by the index's embedder (inferred)."""
    on_rejection: Rejection = Rejection.STOP
    """CLIMB: stop, or continue with another facet, after an answer that did not raise the confidence (inferred)."""
    assessment: Assessment = Assessment.RATINGS
    """CLIMB: ratings of its own, or SAM-RAG's verdicts, graded, for a student that was tuned to those."""
    critic_weights: list[float] = field(default_factory=lambda: [1.0, 1.0, 1.0])
    """CLIMB: weights of relevance, specificity and alignment (inferred: equal)."""
    confidence_weights: list[float] = field(default_factory=lambda: [1.0, 1.0, 1.0])
    """CLIMB: weights of support, specificity and consistency (inferred: equal)."""
    num_agreement_draws: int = 0
    """CLIMB: further answers drawn, whose agreement is a term of the confidence (inferred: none)."""
    agreement_weight: float = 1.0
    """CLIMB: weight of the agreement (inferred)."""
    probability_weight: float = 0.0
    """CLIMB: weight of the answer's token probability, where the engine measures it (inferred: none)."""
    temperature: float = 0.0
    """Temperature of first calls."""
    max_tokens: int = 256
    """Longest reply, in tokens."""
    seed: int = 0
    """Seed of sampled calls."""

    def __post_init__(self) -> None:
        _at_least(self, 0, "temperature", "max_regenerations", "regeneration_temperature", "vote_temperature")
        _at_least(self, 0, "pool_trade_off", "u_star", "t_max", "min_gain", "facet_weight", "num_agreement_draws")
        _at_least(self, 0, "critic_weights", "confidence_weights", "agreement_weight", "probability_weight")
        _at_least(self, 1, "k", "batch_size", "max_batches", "num_votes", "max_tokens", "pool_size", "evidence_size")
        _at_least(self, self.pool_size, "num_candidates")
        for name in ("pool_trade_off", "u_star"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at most 1")


@dataclass(config=STRICT)
class RunArguments:
    """One method over one set of questions."""

    questions_file: str
    """questions.jsonl."""
    documents_file: str
    """documents.jsonl."""
    image_root: str
    """Folder that image paths are relative to."""
    index_dir: str
    """Index over the documents."""
    embedder: str
    """The index's embedder."""
    output_dir: str
    """Folder for traces.jsonl."""
    method: Literal["rag", "sam_rag", "climb"] = "sam_rag"
    """Program to run."""
    pool: bool | None = None
    """Read a complementary pool instead of the ranking; none: CLIMB does, the others do not."""
    is_rel: bool = True
    """SAM-RAG: judge relevance."""
    is_use: bool = True
    """SAM-RAG: judge use."""
    is_sup: bool = True
    """SAM-RAG: judge support."""
    critic: bool = True
    """CLIMB: rank the pool by the critic."""
    iteration: bool = True
    """CLIMB: refine the first answer."""
    facet_diagnosis: bool = True
    """CLIMB: look for what the evidence lacks."""
    engine: Literal["local", "api"] = "local"
    """Who answers: a local model, or the server of the teacher group."""
    prompt_style: Literal["student", "teacher"] | None = None
    """How calls are worded; none: student for a local model, teacher for a server. A tuned student behind a server
    needs student."""
    model_path: str | None = None
    """Local model: folder or hub name."""
    adapter: str | None = None
    """Local model: adapter folder."""
    batch_tokens: int = 16384
    """Local model: tokens per batch."""
    max_batch: int = 64
    """Local model: prompts per batch; the smaller the model, the more it gains from more of them."""
    num_threads: int | None = None
    """Local model: CPU threads; none leaves torch's setting."""
    max_in_flight: int = 256
    """Questions worked on at once."""
    max_questions: int | None = None
    """Questions to use; none is all."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "batch_tokens", "max_batch", "num_threads", "max_in_flight", "max_questions")


@dataclass(config=STRICT)
class StudyArguments:
    """The paper's Tables 2 to 4: methods x retrievers x models x checks, over one set of questions."""

    questions_file: str
    """questions.jsonl."""
    documents_file: str
    """documents.jsonl."""
    image_root: str
    """Folder that image paths are relative to."""
    index_dir: str
    """Index of R, the retriever before tuning."""
    embedder: str
    """R."""
    tuned_index_dir: str
    """Index of R*, the retriever after tuning."""
    tuned_embedder: str
    """R*."""
    model_path: str
    """M, the student before tuning."""
    adapter: str
    """The adapter that makes M* of M."""
    output_dir: str
    """Study folder."""
    with_teacher: bool = True
    """Also run G."""
    climb: bool = False
    """Also run CLIMB and its four ablations, with R*, by M* (on graded verdicts) and by G (on ratings)."""
    teacher_is_simulated: bool = False
    """Say in every table that G is a simulation."""
    batch_tokens: int = 16384
    """Local model: tokens per batch."""
    max_batch: int = 64
    """Local model: prompts per batch; the smaller the model, the more it gains from more of them."""
    num_threads: int | None = None
    """Local model: CPU threads; none leaves torch's setting."""
    max_in_flight: int = 256
    """Questions worked on at once."""
    max_questions: int | None = None
    """Questions to use; none is all."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "batch_tokens", "max_batch", "num_threads", "max_in_flight", "max_questions")


@dataclass(config=STRICT)
class AnswerArguments:
    """One question."""

    question: str
    """The question to answer."""
