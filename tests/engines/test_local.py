"""The local engine on a tiny random LLaVA: batches change nothing, and training text is inference text."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import LlavaForConditionalGeneration, LlavaProcessor

from samrag.calls import JUDGEMENTS, Call, CallKind, Failure, FailureReason, Judgement, Passage, Sampling
from samrag.engines.base import RawReply, Request
from samrag.engines.local import LocalBackend
from samrag.errors import UserError
from samrag.miniworld import tiny_llava
from samrag.prompts import Prompt, PromptStyle, render
from samrag.replies import parse, write
from samrag.schema import ChatMessage
from samrag.training.evaluation import verdict_probabilities
from samrag.vlm import FAMILIES


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _spread(model: torch.nn.Module, seed: int) -> None:
    """Random weights, large in the layers, so that a token depends on the whole prompt and not on the last token."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.1 if "embed" in name else 0.5, generator=generator)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model, its processor and three images."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = tiny_llava.build_tokenizer(vocab_size=600)
    model = tiny_llava.build_model(tokenizer, hidden=32, num_layers=2, seed=0)
    _spread(model, 1)
    model.save_pretrained(folder)
    tiny_llava.build_processor(tokenizer).save_pretrained(folder)
    for colour in ("red", "green", "blue"):
        image = Image.new("RGB", (40, 30), colour)
        image.paste("white", (5, 5, 10 + len(colour), 20))
        image.save(folder / f"{colour}.png")
    return folder


@pytest.fixture(scope="module")
def adapter(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter whose weights matter."""
    out = tmp_path_factory.mktemp("adapter")
    model = LlavaForConditionalGeneration.from_pretrained(folder)
    config = LoraConfig(r=4, target_modules=r".*language_model.*\.(q_proj|v_proj|up_proj)")
    peft_model = get_peft_model(model, config)
    _spread_adapter = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3, generator=_spread_adapter)
    peft_model.save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def backend(folder: Path) -> LocalBackend:
    return LocalBackend.load(folder, image_root=folder)


def generate(backend: LocalBackend, requests: Sequence[Request]) -> list[RawReply | Failure]:
    return asyncio.run(backend.generate(requests))


def request(call: Call, sample_index: int = 0, **sampling: Any) -> Request:
    sampling = {"max_tokens": 24, **sampling}
    return Request(call.kind, render(call, PromptStyle.STUDENT), Sampling(**sampling), sample_index, "t")


def mixed_requests(**sampling: Any) -> list[Request]:
    """Texts of many lengths and images, each with its own length limit."""
    calls = [
        Call(CallKind.IS_REL_TEXT, f"Who founded club {i}?", (Passage(f"Club {i}", "A club by the sea. " * i),))
        for i in range(6)
    ]
    calls += [
        Call(CallKind.IS_REL_IMAGE, f"Which colour has emblem {i}?", title=f"Emblem {i}", image=f"{colour}.png")
        for i, colour in enumerate(("red", "green", "blue", "red"))
    ]
    return [request(call, max_tokens=4 + 5 * (i % 5), **sampling) for i, call in enumerate(calls)]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "sampled"])
def test_a_reply_does_not_depend_on_its_batch(backend: LocalBackend, sampling: dict[str, Any]) -> None:
    requests = mixed_requests(**sampling)
    alone = [generate(backend, [r])[0] for r in requests]
    together = generate(backend, requests)
    backend.batch_tokens, saved = 300, backend.batch_tokens
    small_batches = generate(backend, list(reversed(requests)))[::-1]
    backend.batch_tokens = saved
    assert together == alone
    assert small_batches == alone
    assert len({r.text for r in alone if isinstance(r, RawReply)}) > 5


def test_greedy_replies_are_those_of_transformers(backend: LocalBackend, folder: Path) -> None:
    model = LlavaForConditionalGeneration.from_pretrained(folder).eval()
    processor = LlavaProcessor.from_pretrained(folder)
    for asked in mixed_requests():
        images = [Image.open(folder / asked.prompt.image)] if asked.prompt.image else None
        inputs = processor(
            text=[backend.text(asked.prompt)], images=images, return_tensors="pt", add_special_tokens=False
        )
        tokens = model.generate(**inputs, do_sample=False, max_new_tokens=asked.sampling.max_tokens)[0]
        new = tokens[inputs["input_ids"].shape[1] :]
        [reply] = generate(backend, [asked])
        assert isinstance(reply, RawReply)
        assert reply.text == processor.tokenizer.decode(new, skip_special_tokens=True).strip()
        assert reply.input_tokens == inputs["input_ids"].shape[1]


def test_a_batch_that_does_not_fit_into_memory_is_halved(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = mixed_requests()
    expected = generate(backend, requests)
    decode, sizes = backend._decoder._decode, []

    def small(rows: list[Any], *rest: Any) -> None:
        sizes.append(len(rows))
        if len(rows) > 3:
            raise torch.OutOfMemoryError("out of memory")
        decode(rows, *rest)

    monkeypatch.setattr(backend._decoder, "_decode", small)
    assert generate(backend, requests) == expected
    assert sizes == [10, 5, 2, 3, 5, 2, 3]


def test_draws_repeat_with_the_seed_and_differ_by_sample_index(backend: LocalBackend) -> None:
    call = Call(CallKind.ANSWER, "Who?", (Passage("A", "B"),))
    draws = [request(call, i, temperature=1.0) for i in range(4)]
    first, second = generate(backend, draws), generate(backend, draws)
    assert first == second
    assert len({r.text for r in first if isinstance(r, RawReply)}) == 4
    assert generate(backend, [request(call, temperature=1.0, seed=9)]) != first[:1]


@pytest.mark.parametrize("image", [None, "red.png"])
def test_inference_text_is_the_training_text(backend: LocalBackend, folder: Path, image: str | None) -> None:
    kind = CallKind.IS_REL_IMAGE if image else CallKind.IS_SUP
    prompt = render(Call(kind, "Q <image> </s>?", (Passage("T", "x"),), "T", image, "A"), PromptStyle.STUDENT)
    processor = LlavaProcessor.from_pretrained(folder)
    row = [{"role": "user", "content": prompt.message().content}]
    expected = processor.apply_chat_template(row, tokenize=False, add_generation_prompt=True)
    text = backend.text(prompt)
    assert text == expected
    assert text.count("<s>") == 1
    images = [Image.open(folder / image)] if image else None
    tokens = processor(text=[expected], images=images, add_special_tokens=False)["input_ids"][0]
    [reply] = generate(backend, [Request(kind, prompt, Sampling(max_tokens=1), 0, "t")])
    assert isinstance(reply, RawReply)
    assert reply.input_tokens == len(tokens)


def _force(backend: LocalBackend, text: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Make the model say a text; returns the number of its tokens."""
    tokens = backend._chat.tokenizer(text, add_special_tokens=False)["input_ids"]

    def say(self: object, logits: torch.Tensor, step: int) -> torch.Tensor:
        return torch.full((logits.shape[0],), tokens[min(step, len(tokens) - 1)])

    monkeypatch.setattr("samrag.engines.local._Draw.__call__", say)
    return len(tokens)


def test_a_whole_json_object_ends_the_reply(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    said = '{"Reasoning": "a {brace} and a \\" in it", "Response": "True"}'
    count = _force(backend, f" {said} and more words", monkeypatch)
    [reply] = generate(backend, [request(Call(CallKind.IS_USE, "Q", (), answer="A"), max_tokens=200)])
    assert isinstance(reply, RawReply)
    assert (reply.text, reply.finish_reason) == (said, "stop")
    assert reply.output_tokens < count


def test_end_token_and_limit_are_the_finish_reasons(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request(Call(CallKind.IS_USE, "Q", (), answer="A"), max_tokens=40)
    count = _force(backend, "no object</s>", monkeypatch)
    assert generate(backend, [asked])[0] == RawReply("no object", "stop", _size(backend, asked), count)
    _force(backend, "{", monkeypatch)
    assert generate(backend, [asked])[0] == RawReply("{" * 40, "length", _size(backend, asked), 40)


def _size(backend: LocalBackend, asked: Request) -> int:
    (tokens,) = backend._chat.encode([backend.text(asked.prompt)], [[]])
    return len(tokens)


def test_prompts_beyond_the_context_and_bad_images_fail_alone(backend: LocalBackend, folder: Path) -> None:
    (folder / "broken.png").write_bytes((folder / "red.png").read_bytes()[:60])
    long = request(Call(CallKind.IS_REL_TEXT, "Q", (Passage("T", "w " * 2000),)))
    bad = [request(Call(CallKind.CAPTION_RAW, title="T", image=name)) for name in ("gone.png", "broken.png")]
    good = request(Call(CallKind.CAPTION_RAW, title="T", image="red.png"))
    replies = generate(backend, [long, *bad, good])
    assert [r.reason for r in replies[:3] if isinstance(r, Failure)] == [
        FailureReason.TOO_LONG, FailureReason.BAD_IMAGE, FailureReason.BAD_IMAGE,
    ]  # fmt: skip
    assert replies[3:] == generate(backend, [good])
    with pytest.raises(UserError, match="leaves the data folder"):
        generate(backend, [dataclasses.replace(good, prompt=Prompt("i", "../x.png", "b"))])


def test_a_reply_ends_where_the_context_ends(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    _force(backend, "{", monkeypatch)
    words = request(Call(CallKind.IS_REL_TEXT, "Q", (Passage("T", "x " * 400),)), max_tokens=2000)
    reply, short = generate(backend, [words, request(Call(CallKind.IS_USE, "Q", (), answer="A"), max_tokens=3)])
    assert isinstance(reply, RawReply)
    assert reply.input_tokens + reply.output_tokens == tiny_llava.MAX_TOKENS
    assert isinstance(short, RawReply)
    assert short.output_tokens == 3


def test_adapter_on_and_off_share_the_weights_and_differ(backend: LocalBackend, folder: Path, adapter: Path) -> None:
    tuned = LocalBackend.load(folder, adapter=adapter, image_root=folder)
    base = tuned.with_adapter(False)
    requests = mixed_requests()
    on, off, on_again = generate(tuned, requests), generate(base, requests), generate(tuned, requests)
    assert on == on_again != off
    assert off == generate(backend, requests)
    assert base.identity == backend.identity != tuned.identity
    with pytest.raises(ValueError, match="without an adapter"):
        backend.with_adapter(True)


def test_tuned_weights_give_what_the_adapter_gives_and_switch_back_exactly(folder: Path, adapter: Path) -> None:
    decoder = LocalBackend.load(folder, adapter=adapter, image_root=folder)._decoder
    assert decoder._tuned is not None
    ids = torch.arange(5, 25)[None]
    before = {name: weight.clone() for name, weight in decoder.peft_model.named_parameters()}
    with torch.no_grad():
        expected = decoder.model(input_ids=ids).logits
        with decoder._adapter(True):
            tuned = decoder.model(input_ids=ids).logits
        with decoder._adapter(False):
            base = decoder.model(input_ids=ids).logits
            with decoder.peft_model.disable_adapter():
                assert torch.equal(base, decoder.model(input_ids=ids).logits)
    torch.testing.assert_close(tuned, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(base, expected, atol=1e-3)
    assert all(torch.equal(before[name], weight) for name, weight in decoder.peft_model.named_parameters())


def test_an_adapter_in_half_precision_is_not_added_to_the_weights(folder: Path, adapter: Path) -> None:
    assert LocalBackend.load(folder, adapter=adapter, image_root=folder, dtype="bfloat16")._decoder._tuned is None


def test_identity_follows_content_not_place(backend: LocalBackend, folder: Path, tmp_path: Path) -> None:
    model = LlavaForConditionalGeneration.from_pretrained(folder)
    LlavaProcessor.from_pretrained(folder).save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    assert LocalBackend.load(tmp_path, image_root=folder).identity == backend.identity
    with torch.no_grad():
        model.lm_head.weight[5, 0] += 1
    model.save_pretrained(tmp_path)
    assert LocalBackend.load(tmp_path, image_root=folder).identity != backend.identity


def test_an_adapters_own_chat_template_is_used_with_it(folder: Path, adapter: Path, tmp_path: Path) -> None:
    for path in adapter.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    template = FAMILIES[0].chat_template.replace("USER: ", "ASKED: ")
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    tuned = LocalBackend.load(folder, adapter=tmp_path, image_root=folder)
    prompt = Prompt("i", None, "b")
    assert tuned.text(prompt).startswith("<s>ASKED: ")
    assert tuned.with_adapter(False).text(prompt).startswith("<s>USER: ")


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape", "absent"])
def test_an_adapter_that_does_not_fit_is_refused(folder: Path, adapter: Path, tmp_path: Path, change: str) -> None:
    (tmp_path / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    weights = load_file(adapter / "adapter_model.safetensors")
    name = sorted(weights)[0]
    if change == "missing":
        del weights[name]
    elif change == "unexpected":
        weights[name.replace("layers.0", "layers.7")] = weights[name].clone()
    elif change == "shape":
        weights[name] = torch.zeros(4, 5)
    if change != "absent":
        save_file(weights, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match=str(tmp_path)):
        LocalBackend.load(folder, adapter=tmp_path, image_root=folder)


def test_missing_folder_processor_template_and_weights_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no folder"):
        LocalBackend.load(tmp_path / "gone", image_root=folder)
    for path in folder.iterdir():
        if path.suffix in (".json", ".jinja") and "processor" not in path.name:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(UserError, match=f"{tmp_path}.*processor"):
        LocalBackend.load(tmp_path, image_root=folder)
    (tmp_path / "processor_config.json").write_bytes((folder / "processor_config.json").read_bytes())
    with pytest.raises(UserError, match="could not be loaded"):
        LocalBackend.load(tmp_path, image_root=folder)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="no chat template"):
        LocalBackend.load(tmp_path, image_root=folder)


def test_a_cancelled_call_stops_and_the_next_one_works(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    _force(backend, "{", monkeypatch)
    asked = request(Call(CallKind.IS_USE, "Q", (), answer="A"), max_tokens=900)

    async def work() -> list[RawReply | Failure]:
        task = asyncio.create_task(backend.generate([asked]))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await backend.generate([dataclasses.replace(asked, sampling=Sampling(max_tokens=2))])

    [reply] = asyncio.run(work())
    assert isinstance(reply, RawReply)
    assert reply.output_tokens == 2


def test_calls_that_wait_for_the_model_are_answered_as_one_batch(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = mixed_requests()
    expected = generate(backend, requests)
    decode, sizes = backend._decoder._decode, []

    def counted(rows: list[Any], *rest: Any) -> None:
        sizes.append(len(rows))
        decode(rows, *rest)

    monkeypatch.setattr(backend._decoder, "_decode", counted)

    async def work() -> list[RawReply | Failure]:
        return [reply for [reply] in await asyncio.gather(*[backend.generate([r]) for r in requests])]

    assert asyncio.run(work()) == expected
    assert sum(sizes) == len(requests)
    assert len(sizes) <= 3


def test_an_error_reaches_every_waiting_call(backend: LocalBackend) -> None:
    bad = request(Call(CallKind.CAPTION_RAW, title="T", image="../x.png"))

    async def work() -> list[Any]:
        return await asyncio.gather(*[backend.generate([bad]) for _ in range(3)], return_exceptions=True)

    assert [type(error) for error in asyncio.run(work())] == [UserError] * 3


def test_settings_below_one_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="max_batch is 0"):
        LocalBackend.load(folder, image_root=folder, max_batch=0)
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"] == "llava"


@pytest.mark.parametrize("kind", JUDGEMENTS)
def test_a_direct_verdict_is_the_likeliest_and_has_its_probability(
    kind: CallKind, backend: LocalBackend, folder: Path
) -> None:
    """Against the whole replies' likelihoods, scored one by one."""
    calls = [
        Call(
            kind, f"Who {'really ' * i}founded it?", (Passage("Club", "By the sea."),), "Club", answer="A", direct=True
        )
        for i in range(3)
    ]
    if kind is CallKind.IS_REL_IMAGE:
        colours = ("red", "blue", "red")
        calls = [dataclasses.replace(c, image=f"{colour}.png") for c, colour in zip(calls, colours, strict=True)]
    asked = [dataclasses.replace(request(call), direct=True) for call in calls]
    reasoned = request(Call(CallKind.ANSWER, "Q?", (Passage("T", "x"),)))
    *replies, other = generate(backend, [*asked, reasoned])
    assert isinstance(other, RawReply) and other.probability is None
    model, chat = backend._decoder.model, backend._chat
    for made, reply in zip(asked, replies, strict=True):
        picture = chat.picture(folder / made.prompt.image) if made.prompt.image else None
        (prompt,) = chat.encode([backend.text(made.prompt)], [[picture.tokens] if picture else []])
        verdicts = chat.encode_replies(
            [(ChatMessage("user", "x"), ChatMessage("assistant", write("", v))) for v in JUDGEMENTS[kind]]
        )
        begun = next(i for i, tokens in enumerate(zip(*verdicts, strict=False)) if len(set(tokens)) > 1)
        cut = [tokens[: begun + 1] for tokens in verdicts]
        (scores,) = verdict_probabilities(model, chat, [(prompt, [picture] if picture else [])], [cut], 8)
        assert isinstance(reply, RawReply)
        assert reply.output_tokens == 1
        said = parse(kind, reply.text)
        assert isinstance(said, Judgement)
        assert JUDGEMENTS[kind].index(said.verdict) == max(range(len(scores)), key=scores.__getitem__)
        assert reply.probability == pytest.approx(max(scores), abs=1e-4)
