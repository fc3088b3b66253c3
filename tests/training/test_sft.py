"""SFT of a tiny random LLaVA: what is learnt from, what is refused, what is saved."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import samrag
from samrag import vlm
from samrag.arguments import MergeArguments
from samrag.calls import Call, CallKind, Passage
from samrag.errors import UserError
from samrag.exporting import trl_record
from samrag.files import read_json, write_records
from samrag.miniworld import tiny_llava
from samrag.prompts import PromptStyle, render, template_hash
from samrag.replies import write
from samrag.schema import ChatMessage, SftRow
from samrag.training import merging, sft, student
from samrag.training.collator import IGNORED, SftCollator
from samrag.training.evaluation import generate
from samrag.training.sft_arguments import SftArguments
from samrag.vlm import FAMILIES
from tests import families

ROOT = Path(samrag.__file__).parent.parent
QUESTION = "What is the colour of the emblem?"


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Folder of an untrained LLaVA; its embeddings are larger, or frozen outputs could not differ."""
    folder = tmp_path_factory.mktemp("base")
    with pytest.MonkeyPatch.context() as patch:
        texts = list(itertools.islice(tiny_llava._tokenizer_texts(0), 300))
        patch.setattr(tiny_llava, "_tokenizer_texts", lambda seed: texts)
        tokenizer = tiny_llava.build_tokenizer()
    model = tiny_llava.build_model(tokenizer, hidden=64, num_layers=2, seed=0)
    model.get_input_embeddings().weight.data.mul_(10)
    model.save_pretrained(folder)
    tiny_llava.build_processor(tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture
def loaded(base):
    return student.load(SftArguments(str(base), ["x"]))


def make_row(call: Call, reasoning: str, response: str, **changes: object) -> SftRow:
    row = SftRow(
        messages=(render(call, PromptStyle.STUDENT).message(), ChatMessage("assistant", write(reasoning, response))),
        images=(call.image,) if call.image else (),
        kind=str(call.kind),
        label=response,
        question_id="q",
        doc_ids=(),
        template=template_hash(PromptStyle.STUDENT, call.kind),
    )
    return dataclasses.replace(row, **changes)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Folder with `sft.jsonl`: two text rows and two image rows."""
    folder = tmp_path_factory.mktemp("data")
    for name in ("red", "blue"):
        Image.new("RGB", (40, 50), name).save(folder / f"{name}.png")
    club, clubs = (Passage("Club", "It is red."),), (Passage("Clubs", "Blue."), Passage("B", "c"))
    emblem = Call(CallKind.IS_REL_IMAGE, QUESTION, title="Old emblem", image="red.png")
    rows = [
        make_row(Call(CallKind.IS_REL_TEXT, QUESTION, club), "It is about the club.", "True"),
        make_row(Call(CallKind.ANSWER, QUESTION, clubs), "So it says.", "blue"),
        make_row(emblem, "It shows red.", "False"),
        make_row(Call(CallKind.CAPTION_QUERY, QUESTION, title="New flag", image="blue.png"), "", "A blue field."),
    ]
    write_records(folder / "sft.jsonl", rows)
    return folder


@pytest.fixture
def rows(data):
    return sft.located(data / "sft.jsonl", None)


def changed(item, **changes):
    return item._replace(row=dataclasses.replace(item.row, **changes))


def run_preflight(rows, loaded, **limits):
    model, chat = loaded
    return sft.preflight(rows, chat, model, **limits)


def make_trainer(rows, loaded, folder, arguments=None, held_out=None, **settings):
    from trl import SFTConfig

    arguments = arguments or SftArguments("x", ["x"], lora_r=16, lora_alpha=32)
    settings = {"max_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-2, **settings}
    config = SFTConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, max_length=None,
        activation_checkpointing=False, **{"save_strategy": "no", **settings},
    )  # fmt: skip
    checked = run_preflight(rows, loaded)
    evaluation = run_preflight(held_out, loaded) if held_out else None
    return sft.build_trainer(*loaded, config, arguments, checked, evaluation), checked


def collate(rows, loaded):
    checked = run_preflight(rows, loaded)
    return SftCollator(loaded[1])([checked.dataset[i] for i in range(len(checked.dataset))])


class TestRows:
    def changed(self, data, tmp_path, **changes):
        lines = (data / "sft.jsonl").read_text(encoding="utf-8").splitlines()
        lines[2] = json.dumps({**json.loads(lines[2]), **changes})
        path = tmp_path / "sft.jsonl"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    def test_wrong_image_count_is_refused_with_its_line(self, data, tmp_path):
        with pytest.raises(UserError, match=r"line 3.*1 <image> markers for 0 images"):
            sft.load_rows(self.changed(data, tmp_path, images=[]))

    def test_unknown_role_is_refused_with_its_line(self, data, tmp_path):
        messages = [{"role": "robot", "content": "<image>"}, {"role": "assistant", "content": "a"}]
        with pytest.raises(UserError, match=r"line 3.*robot"):
            sft.load_rows(self.changed(data, tmp_path, messages=messages))

    def test_image_marker_in_a_reply_is_refused(self, data, tmp_path):
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<image>"}]
        with pytest.raises(UserError, match=r"line 3.*user turns only"):
            sft.load_rows(self.changed(data, tmp_path, messages=messages))

    def test_a_row_without_user_turn_is_refused(self, data, tmp_path):
        messages = [{"role": "assistant", "content": "a"}]
        with pytest.raises(UserError, match=r"line 3.*no user turn"):
            sft.load_rows(self.changed(data, tmp_path, messages=messages, images=[]))

    def test_other_prompt_templates_are_refused(self, data, tmp_path):
        with pytest.raises(UserError, match=r"line 3.*'old'.*write the file again"):
            sft.load_rows(self.changed(data, tmp_path, template="old"))

    def test_an_empty_file_is_refused(self, tmp_path):
        (tmp_path / "sft.jsonl").write_text("", encoding="utf-8")
        with pytest.raises(UserError, match="is empty"):
            sft.load_rows(tmp_path / "sft.jsonl")

    def test_an_image_outside_the_folder_is_refused(self, rows, loaded):
        with pytest.raises(UserError, match="leaves the data folder"):
            run_preflight([changed(rows[2], images=("../red.png",))], loaded)

    def test_an_unknown_kind_is_refused(self, data, tmp_path):
        with pytest.raises(UserError, match=r"line 3.*'is_nice' is no kind of call"):
            sft.load_rows(self.changed(data, tmp_path, kind="is_nice"))

    def test_a_limit_takes_rows_from_the_whole_file(self, rows):
        assert sft.spread(rows, 2) == [rows[0], rows[2]]
        assert sft.spread(rows, 0) == rows

    def test_files_are_mixed_by_their_weights(self, rows):
        other = [changed(item, question_id="other") for item in rows]
        mixed = sft.mixed([rows, other], [2.0, 0.5], seed=0)
        assert mixed[:8] == [*rows, *rows]
        assert len(mixed) == 10
        assert set(mixed[8:]) <= set(other)
        assert mixed == sft.mixed([rows, other], [2.0, 0.5], seed=0)
        assert sft.mixed([rows, other], [], seed=0) == [*rows, *other]

    def test_prompts_render_to_the_stored_text(self, rows, loaded):
        for item in rows:
            text = loaded[1].text(item.row.messages[:-1])
            assert text == f"<s>USER: {item.row.messages[0].content}\nASSISTANT:"


class TestLabels:
    def test_loss_is_on_the_reply_and_its_stop_token_alone(self, rows, data, loaded):
        tokenizer = loaded[1].tokenizer
        for (row, _), labels in zip(rows, collate(rows, loaded)["labels"], strict=True):
            text = tokenizer.decode(labels[labels != IGNORED])
            assert text == f" {row.messages[-1].content}</s>"

    def test_image_tokens_are_never_labels_and_match_the_features(self, rows, data, loaded):
        model, chat = loaded
        batch = collate(rows, loaded)
        assert not (batch["labels"] == chat.image_token_id).any()
        assert (batch["input_ids"] == chat.image_token_id).sum(1).tolist() == [0, 0, 16, 16]
        assert torch.isfinite(model(**batch).loss)

    def test_training_prompts_have_the_ids_of_inference(self, rows, data, loaded):
        checked = run_preflight(rows, loaded)
        for (row, _), kept in zip(rows, checked.dataset, strict=True):
            image = [{"type": "image", "image": Image.open(data / name)} for name in row.images]
            before, _, after = row.messages[0].content.partition("<image>")
            content = [{"type": "text", "text": before}, *image, {"type": "text", "text": after}]
            output = loaded[1].processor.apply_chat_template(
                [{"role": "user", "content": content}], tokenize=True, add_generation_prompt=True, return_dict=True
            )
            assert kept["input_ids"][: kept["label_start"]] == list(output["input_ids"][0])
            assert kept["input_ids"].count(loaded[1].tokenizer.bos_token_id) == 1

    def test_batches_and_loss_equal_trl_s_own(self, rows, data, loaded):
        from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

        model, chat = loaded
        model.eval()
        theirs = DataCollatorForVisionLanguageModeling(chat.processor, max_length=None, completion_only_loss=True)
        ours = collate(rows, loaded)
        records = [trl_record(item.row) for item in rows]
        wanted = theirs([{**one, "images": [str(data / name) for name in one["images"]]} for one in records])
        for name in ("input_ids", "attention_mask", "labels"):
            assert torch.equal(ours[name], wanted[name])
        losses = [model(**{k: batch[k] for k in ours}).loss.item() for batch in (ours, wanted)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)


class TestPreflight:
    def long(self, rows, count, title="Club"):
        call = Call(CallKind.IS_REL_TEXT, QUESTION, (Passage(title, "word " * count), Passage("Other", "It is red.")))
        return rows[0]._replace(row=make_row(call, "r", "True"))

    def test_a_long_prompt_is_left_out_and_counted(self, rows, loaded):
        checked = run_preflight([*rows, self.long(rows, 400)], loaded, max_prompt_tokens=300, shorten=False)
        assert checked.excluded == {"over 300 tokens in the prompt": 1}
        assert len(checked.dataset) == 4
        assert checked.rows["is_rel_text"] == {"True": 1}

    def test_a_long_rows_documents_are_shortened_and_nothing_else(self, rows, loaded):
        long = self.long(rows, 400)
        checked = run_preflight([*rows, long], loaded, max_prompt_tokens=300)
        assert checked.shortened == 1
        assert not checked.excluded
        assert 200 < checked.dataset[4]["label_start"] <= 300
        before, after = (item.row.messages[0].content for item in (long, checked.kept[4]))
        assert after.count("word ") > 100
        assert re.sub(r"(word ?)+", "", after) == re.sub(r"(word ?)+", "", before)
        target = checked.dataset[4]["input_ids"][checked.dataset[4]["label_start"] :]
        assert loaded[1].decode(target) == long.row.messages[-1].content

    def test_a_row_that_is_long_for_another_reason_is_left_out(self, rows, loaded):
        call = Call(CallKind.IS_REL_TEXT, "why " * 400, (Passage("A", "b c"),))
        long = rows[0]._replace(row=make_row(call, "r", "True"))
        checked = run_preflight([*rows, long], loaded, max_prompt_tokens=300)
        assert checked.excluded == {"over 300 tokens in the prompt": 1}
        assert checked.shortened == 0

    def test_no_row_that_fits_is_an_error(self, rows, loaded):
        with pytest.raises(UserError, match=r"none of 4 rows can be learnt.*4 over 20 tokens"):
            run_preflight(rows, loaded, max_tokens=20, max_prompt_tokens=1000)

    def test_rows_beyond_the_models_context_are_left_out(self, rows, loaded):
        checked = run_preflight([*rows, self.long(rows, 1500)], loaded, shorten=False)
        assert sum(checked.excluded.values()) == 1

    @pytest.mark.parametrize("reply", [" ", "a</s>b"])
    def test_rows_without_one_clear_target_are_left_out(self, rows, loaded, reply):
        messages = (rows[0].row.messages[0], ChatMessage("assistant", reply))
        checked = run_preflight([*rows, changed(rows[0], messages=messages)], loaded)
        assert sum(checked.excluded.values()) == 1

    def test_a_processor_that_miscounts_image_tokens_is_refused(self, rows, loaded):
        loaded[1].processor.num_additional_image_tokens = 0
        with pytest.raises(UserError, match="15 tokens in the prompt but 16 features"):
            run_preflight(rows, loaded)

    def test_a_processor_with_another_template_is_refused(self, rows, loaded, monkeypatch):
        monkeypatch.setattr(loaded[1], "reference", lambda messages, paths: [1])
        with pytest.raises(UserError, match="other tokens in training than at inference"):
            run_preflight(rows, loaded)


class TestAdvice:
    def test_gaps_in_the_rows_are_named(self, rows, loaded, caplog):
        caplog.set_level("WARNING", logger="samrag")
        checked = run_preflight(rows[:2], loaded)
        sft.warn_of_gaps(checked, run_preflight(rows, loaded))
        assert "no rows of is_use, is_sup" in caplog.text
        assert "all rows of is_rel_text are True" in caplog.text
        assert "eval_file has rows of caption_query, is_rel_image, which train_files lack" in caplog.text

    def test_too_little_memory_is_answered_by_what_can_still_be_saved(self, rows, loaded, tmp_path):
        from trl import SFTConfig

        checked = run_preflight(rows, loaded)
        settings = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
        large = SFTConfig(per_device_train_batch_size=8, activation_checkpointing=False, **settings)
        advice = sft.out_of_memory_advice(SftArguments("x", ["x"], tuning="full"), large, checked)
        for words in ("activation_checkpointing: true", "below 8", "max_batch_tokens", "tuning: lora"):
            assert words in advice
        small = SFTConfig(per_device_train_batch_size=1, activation_checkpointing=True, **settings)
        advice = sft.out_of_memory_advice(SftArguments("x", ["x"], quantization="4bit"), small, checked)
        assert "set several GPUs" in advice


class TestModel:
    def test_old_processors_are_completed_from_the_model(self, base, tmp_path):
        for path in base.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        config = read_json(tmp_path / "processor_config.json")
        del config["patch_size"], config["vision_feature_select_strategy"]
        (tmp_path / "processor_config.json").write_text(json.dumps(config), encoding="utf-8")
        (tmp_path / "chat_template.jinja").unlink()
        _, chat = student.load(SftArguments(str(tmp_path), ["x"]))
        assert (chat.processor.patch_size, chat.processor.vision_feature_select_strategy) == (8, "default")
        assert chat.processor.chat_template == FAMILIES[0].chat_template

    def test_a_model_without_processor_is_refused(self, base, tmp_path):
        for name in ("config.json", "model.safetensors"):
            (tmp_path / name).write_bytes((base / name).read_bytes())
        with pytest.raises(UserError, match="no usable processor"):
            student.load(SftArguments(str(tmp_path), ["x"]))

    def test_a_missing_folder_is_refused(self):
        with pytest.raises(UserError, match="is no folder"):
            student.load(SftArguments("./nowhere/at/all", ["x"]))

    def test_the_adapter_names_its_base_by_a_relative_path(self, base, monkeypatch):
        monkeypatch.chdir(base.parent)
        model, _ = student.load(SftArguments(str(base), ["x"]))
        assert model.name_or_path == base.name

    def test_the_fingerprint_tells_weights_apart(self, base, tmp_path):
        for path in base.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        assert vlm.model_fingerprint(tmp_path) == vlm.model_fingerprint(base)
        data = bytearray((tmp_path / "model.safetensors").read_bytes())
        data[-1] ^= 1
        (tmp_path / "model.safetensors").write_bytes(bytes(data))
        assert vlm.model_fingerprint(tmp_path) != vlm.model_fingerprint(base)


@pytest.mark.training
class TestTraining:
    def test_the_adapter_lies_in_the_language_model_alone(self, rows, data, loaded, tmp_path):
        trainer, _ = make_trainer(rows, loaded, tmp_path)
        names = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
        assert len(names) == 2 * 7 * 2  # layers, projections, A and B
        assert all("language_model" in name for name in names)

    def test_unfrozen_parts_get_an_adapter_too(self, rows, data, loaded, tmp_path):
        arguments = SftArguments("x", ["x"], freeze_vision_tower=False, freeze_multi_modal_projector=False)
        trainer, _ = make_trainer(rows, loaded, tmp_path, arguments)
        names = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
        assert any("vision_tower" in name for name in names)
        assert any("multi_modal_projector" in name for name in names)

    def test_every_trainable_tensor_gets_a_gradient(self, rows, data, loaded, tmp_path):
        from transformers import TrainerCallback

        class Gradients(TrainerCallback):
            def __init__(self):
                self.seen = []

            def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
                found = [(n, p.grad) for n, p in model.named_parameters() if p.requires_grad]
                live = [name for name, gradient in found if gradient is not None and gradient.any()]
                self.seen.append((sum("lora_A" in name for name in live), sum("lora_B" in name for name in live)))

        trainer, _ = make_trainer(rows, loaded, tmp_path)
        gradients = Gradients()
        trainer.add_callback(gradients)
        trainer.train()
        assert gradients.seen == [(0, 14), (14, 14)]  # B is 0 at first, so A gets its gradient at the second step

    def test_an_overfit_student_repeats_the_replies_and_stops(self, rows, data, loaded, tmp_path):
        trainer, checked = make_trainer(rows, loaded, tmp_path, max_steps=160, lr_scheduler_type="cosine")
        trainer.train()
        replies = generate(trainer.model, loaded[1], checked.held_out(4), batch_size=3)
        assert replies == [(item.row.messages[-1].content, True) for item in rows]

    def test_a_saved_adapter_gives_the_probe_back_and_a_lost_one_is_noticed(self, base, rows, data, loaded, tmp_path):
        from peft import PeftModel

        trainer, checked = make_trainer(rows, loaded, tmp_path, max_steps=5)
        trainer.train()
        student.save(trainer, loaded[1], tmp_path, checked.summary(), vlm.model_fingerprint(base))
        facts = read_json(tmp_path / student.ADAPTER_FILE)
        assert facts["templates"] == {kind: template_hash(PromptStyle.STUDENT, CallKind(kind)) for kind in checked.rows}
        assert facts["training"]["rows"]["answer"] == {"blue": 1}

        plain, chat = student.load(SftArguments(str(base), ["x"]))
        tuned = PeftModel.from_pretrained(plain, tmp_path)
        student.check_adapter(tuned, chat, tmp_path)
        assert student.probe_logits(tuned, chat) == pytest.approx(facts["probe"]["logits"], abs=1e-4)
        with tuned.disable_adapter(), pytest.raises(UserError, match="no effect"):
            student.check_adapter(tuned, chat, tmp_path)

    def test_a_resumed_run_ends_as_the_whole_run(self, base, rows, data, tmp_path):
        def adapter(folder, resume=None, **settings):
            settings = {
                "max_steps": 6, "per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 3,
                "train_sampling_strategy": "group_by_length", "logging_steps": 1, **settings,
            }  # fmt: skip
            many = [changed(item, question_id=str(i)) for i in range(2) for item in rows]
            trainer, _ = make_trainer(many, student.load(SftArguments(str(base), ["x"])), folder, **settings)
            if resume:
                sft.carry_token_count(trainer, resume)
            trainer.train(resume_from_checkpoint=str(resume) if resume else None)
            tensors = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
            return tensors, trainer._total_train_tokens

        whole, num_tokens = adapter(tmp_path)
        checkpoint = tmp_path / "checkpoint-3"
        (tmp_path / "checkpoint-6" / "trainer_state.json").unlink()  # as a kill while saving leaves it
        assert sft.last_checkpoint(tmp_path) == checkpoint
        resumed, num_tokens_resumed = adapter(tmp_path, checkpoint, save_strategy="no")
        assert num_tokens == num_tokens_resumed
        for name, tensor in whole.items():
            torch.testing.assert_close(resumed[name], tensor)

    def test_a_run_is_not_resumed_with_other_settings(self, tmp_path):
        assert sft.resumable(tmp_path, {"seed": 1, "train_data": "a"}) is None
        (tmp_path / "checkpoint-2").mkdir()
        (tmp_path / "checkpoint-2" / "trainer_state.json").write_text("{}", encoding="utf-8")
        assert sft.resumable(tmp_path, {"seed": 1, "train_data": "a"}) == tmp_path / "checkpoint-2"
        with pytest.raises(UserError, match=r"another run \(train_data\); choose another output_dir"):
            sft.resumable(tmp_path, {"seed": 1, "train_data": "b"})


@pytest.mark.training
class TestWays:
    """What is trained, how batches are made, when it stops."""

    @pytest.mark.parametrize("name", ["qwen2_5_vl", "idefics3", "internvl", "llava_next"])
    def test_any_family_overfits_and_stops(self, name, rows, tmp_path):
        base = families.build(name, tmp_path / "base")
        arguments = SftArguments(str(base), ["x"], lora_r=32, lora_alpha=64)
        loaded = student.load(arguments)
        trainer, checked = make_trainer(rows, loaded, tmp_path / "out", arguments, max_steps=150, learning_rate=2e-2)
        trainer.train()
        replies = generate(trainer.model, loaded[1], checked.held_out(4), batch_size=4)
        assert [stopped for _, stopped in replies] == [True] * 4
        assert sum(text == item.row.messages[-1].content for (text, _), item in zip(replies, rows, strict=True)) >= 3
        student.save(trainer, loaded[1], tmp_path / "out", checked.summary(), "x")
        plain, chat = student.load(arguments)
        student.check_adapter(vlm.load_adapter(plain, tmp_path / "out"), chat, tmp_path / "out")

    def test_full_tuning_changes_the_language_model_alone(self, base, rows, loaded, tmp_path):
        before = {name: tensor.clone() for name, tensor in loaded[0].state_dict().items()}
        arguments = SftArguments(str(base), ["x"], tuning="full")
        trainer, checked = make_trainer(rows, loaded, tmp_path, arguments, learning_rate=1e-3)
        trainer.train()
        changed = {n for n, tensor in loaded[0].state_dict().items() if not torch.equal(tensor, before[n])}
        assert changed
        assert not [n for n in changed if "vision_tower" in n or "multi_modal_projector" in n]
        student.save(trainer, loaded[1], tmp_path, checked.summary(), "x")
        assert student.check_templates(tmp_path)["tuning"] == "full"
        again, _ = student.load(SftArguments(str(tmp_path), ["x"]))
        assert all(torch.equal(tensor, loaded[0].state_dict()[n]) for n, tensor in again.state_dict().items())

    @pytest.mark.parametrize("option", ["use_dora", "use_rslora"])
    def test_other_adapters_come_back_as_saved(self, option, base, rows, loaded, tmp_path):
        arguments = SftArguments(str(base), ["x"], **{option: True})
        trainer, checked = make_trainer(rows, loaded, tmp_path, arguments)
        trainer.train()
        student.save(trainer, loaded[1], tmp_path, checked.summary(), "x")
        plain, chat = student.load(arguments)
        student.check_adapter(vlm.load_adapter(plain, tmp_path), chat, tmp_path)

    def test_parts_of_a_batch_learn_what_the_whole_does(self, base, rows, tmp_path):
        many = [changed(item, question_id=str(i)) for i in range(3) for item in rows]
        found = []
        for max_tokens in (None, 200):
            arguments = SftArguments(str(base), ["x"], max_batch_tokens=max_tokens, response_weight=3.0)
            loaded = student.load(arguments)
            trainer, checked = make_trainer(
                many, loaded, tmp_path, arguments, max_steps=-1, num_train_epochs=2, logging_steps=1
            )
            batch = next(iter(trainer.get_train_dataloader()))
            assert (len(batch.get("parts", [batch])) > 1) is (max_tokens is not None)
            trainer.train()
            losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            tensors = [p.detach() for p in trainer.model.parameters() if p.requires_grad]
            found.append((losses, tensors, trainer._total_train_tokens))
            assert trainer._total_train_tokens == 2 * checked.num_tokens
        (whole, tensors, _), (parts, others, _) = found
        assert parts == pytest.approx(whole, rel=1e-4)
        for one, other in zip(tensors, others, strict=True):
            torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-3)

    def test_held_out_replies_are_scored_and_choose_the_best_checkpoint(self, base, rows, loaded, tmp_path):
        arguments = SftArguments(
            str(base), ["x"], lora_r=16, lora_alpha=32, max_batch_tokens=200, scored_rows=4, early_stopping_patience=4
        )
        trainer, _ = make_trainer(
            rows, loaded, tmp_path, arguments, rows, max_steps=800, eval_strategy="steps", eval_steps=40,
            save_strategy="steps", save_steps=40, save_total_limit=1, load_best_model_at_end=True,
            metric_for_best_model="answer_em", greater_is_better=True, lr_scheduler_type="constant", learning_rate=4e-3,
        )  # fmt: skip
        trainer.train()
        history = [entry for entry in trainer.state.log_history if "eval_answer_em" in entry]
        assert trainer.state.best_metric == 1.0
        best = next(entry for entry in history if entry["eval_answer_em"] == 1.0)
        assert trainer.state.global_step == best["step"] + 4 * 40  # four evaluations without a better one
        for name in ("eval_loss", "eval_parse_rate", "eval_stop_rate", "eval_is_rel_text_verdict_accuracy"):
            assert name in best
        files = sorted((tmp_path / "evaluation").iterdir())
        assert len(files) == len(history)
        samples = [json.loads(line) for line in (tmp_path / "evaluation" / f"step-{best['step']}.jsonl").open()]
        assert [sample["kind"] for sample in samples] == [item.row.kind for item in rows]

    def test_the_response_is_weighed_in_training_alone(self, base, rows, loaded, tmp_path):
        model, chat = loaded
        model.eval()
        batch = SftCollator(chat, with_response=True)([run_preflight(rows, loaded).dataset[i] for i in range(4)])
        mask = batch.pop("response_mask")
        for item, ids, own in zip(rows, batch["input_ids"], mask, strict=True):
            reply = item.row.messages[-1].content
            marked = chat.decode(ids[own].tolist())
            assert reply.endswith(marked)
            assert marked.lstrip('.", {').startswith('Response": "')  # a token may begin before the key
        logs = model(**batch).logits[:, :-1].log_softmax(-1)
        labels = batch["labels"][:, 1:]
        each = -logs.gather(-1, labels.clamp(min=0)[:, :, None])[:, :, 0] * (labels != IGNORED)
        wanted = (each * torch.where(mask[:, 1:], 5.0, 1.0)).sum() / (labels != IGNORED).sum()
        plain = each.sum() / (labels != IGNORED).sum()
        arguments = SftArguments(str(base), ["x"], response_weight=5.0)
        trainer, _ = make_trainer(rows, loaded, tmp_path, arguments, max_steps=1)
        trainer.model.train()
        given = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
        assert trainer.compute_loss(trainer.model, dict(given)).item() == pytest.approx(wanted.item(), rel=1e-4)
        trainer.model.eval()
        assert trainer.compute_loss(trainer.model, dict(given)).item() == pytest.approx(plain.item(), rel=1e-4)

    def test_early_stopping_without_evaluations_is_refused(self, base, rows, loaded, tmp_path):
        with pytest.raises(UserError, match="early_stopping_patience needs eval_strategy"):
            make_trainer(rows, loaded, tmp_path, SftArguments(str(base), ["x"], early_stopping_patience=2))

    def test_a_tensor_without_gradient_is_noticed(self, base, rows, loaded, tmp_path):
        arguments = SftArguments(str(base), ["x"], freeze_vision_tower=False)
        trainer, _ = make_trainer(rows[:2], loaded, tmp_path, arguments, max_steps=30, learning_rate=1e-4)
        with pytest.raises(UserError, match=r"vision_tower.*got no gradient in 20 steps; either no row uses"):
            trainer.train()

    def test_merged_weights_reply_as_base_and_adapter(self, base, rows, loaded, tmp_path, monkeypatch):
        trainer, checked = make_trainer(rows, loaded, tmp_path / "adapter", max_steps=20)
        trainer.train()
        student.save(trainer, loaded[1], tmp_path / "adapter", checked.summary(), vlm.model_fingerprint(base))
        arguments = MergeArguments(str(tmp_path / "adapter"), str(tmp_path / "merged"), str(base))
        facts = read_json(merging.merge(arguments) / student.ADAPTER_FILE)
        assert facts["merge_difference"] <= 1e-5
        model, chat = student.load(SftArguments(str(tmp_path / "merged"), ["x"]))
        held_out = checked.held_out(4)
        assert generate(model, chat, held_out, 4) == generate(trainer.model, loaded[1], held_out, 4)
        (tmp_path / "precious").mkdir()
        (tmp_path / "precious" / "thesis.txt").write_text("x", encoding="utf-8")
        for output, message in (("precious", "not from a merge"), ("adapter", "the base or the adapter itself")):
            with pytest.raises(UserError, match=message):
                merging.merge(dataclasses.replace(arguments, output_dir=str(tmp_path / output)))
        assert (tmp_path / "precious" / "thesis.txt").exists()
        with pytest.raises(UserError, match="has other weights"):  # the adapter is in the merged model already
            student.check_base(tmp_path / "merged", tmp_path / "adapter")
        monkeypatch.setitem(merging.TOLERANCE, "float32", -1.0)
        broken = dataclasses.replace(arguments, output_dir=str(tmp_path / "other"))
        with pytest.raises(UserError, match="logits differ"):
            merging.merge(broken)
        assert not (tmp_path / "other").exists()


class TestArguments:
    @pytest.mark.parametrize("wrong", [{"lora_r": 0}, {"lora_dropout": 1.0}, {"eval_rows": -1}, {"num_threads": 0}])
    def test_impossible_values_name_their_field(self, wrong):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            SftArguments("x", ["x"], **wrong)

    @pytest.mark.parametrize("name", ["sft", "paper/sft", "quickstart/sft"])
    def test_every_configuration_parses(self, name):
        from trl import SFTConfig

        from samrag.config import parse

        path = ROOT / "configs" / f"{name}.yaml"
        arguments, training = parse(
            SftArguments, SFTConfig, args=["--config", str(path), "--use_cpu", "true", "--bf16", "false"]
        )
        assert arguments.model_path
        assert training.max_length is None
        command = path.read_text(encoding="utf-8").splitlines()[0]
        assert command.startswith("# accelerate launch")
        assert command.endswith(f"train/sft.py --config configs/{name}.yaml")


@pytest.mark.entry
class TestEntry:
    def launch(self, *arguments, config):
        command = [sys.executable, str(ROOT / "train" / "sft.py"), "--config", str(config), *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)

    def test_two_steps_write_an_adapter_once(self, base, data, tmp_path):
        arguments = [
            "--model_path",
            base,
            "--train_files",
            data / "sft.jsonl",
            "--image_root",
            data,
            "--output_dir",
            tmp_path / "out",
        ]
        arguments += ["--max_steps", 2, "--report_to", "none", "--num_threads", 1]
        config = ROOT / "configs" / "quickstart" / "sft.yaml"
        done = self.launch(*arguments, config=config)
        assert done.returncode == 0, done.stderr
        files = ["adapter_model.safetensors", "adapter_config.json", "chat_template.jinja", "samrag.json", "run.json"]
        for name in files:
            assert (tmp_path / "out" / name).is_file()
        again = self.launch(*arguments, config=config)
        assert again.returncode == 0
        assert "nothing to do" in again.stderr

    def test_a_run_is_tracked_offline_with_its_data_samples_and_model(self, base, data, tmp_path, monkeypatch):
        monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
        monkeypatch.delenv("WANDB_MODE", raising=False)
        out, config = tmp_path / "out", ROOT / "configs" / "quickstart" / "sft.yaml"
        done = self.launch(
            *self.settings(
                base, data, out, max_steps=2, report_to="wandb", eval_file=data / "sft.jsonl", eval_strategy="steps",
                eval_steps=2,
            ), config=config,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        (run,) = out.glob("wandb/offline-run-*/run-*.wandb")
        logged = run.read_bytes()
        for word in (b"out-data-sft", b"samples", b"eval/stop_rate", b"learning_rate", b"adapter_model.safetensors"):
            assert word in logged, word
        assert b"sk-very-secret" not in logged
        assert run.stem.removeprefix("run-") == (out / "wandb_run_id.txt").read_text(encoding="utf-8")

    def settings(self, base, data, out, **changes):
        given = {
            "model_path": base, "train_files": data / "sft.jsonl", "image_root": data, "output_dir": out,
            "max_steps": 6, "per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 2,
            "report_to": "none", "num_threads": 1, "logging_steps": 1, **changes,
        }  # fmt: skip
        return [str(word) for name, value in given.items() for word in (f"--{name}", value)]

    def losses(self, out):
        state = read_json(sft.last_checkpoint(out) / "trainer_state.json")
        return [entry["loss"] for entry in state["log_history"] if "loss" in entry]

    def test_a_run_killed_while_it_saves_ends_as_an_undisturbed_one(self, base, data, tmp_path):
        config = ROOT / "configs" / "quickstart" / "sft.yaml"
        calm, killed = tmp_path / "calm", tmp_path / "killed"
        assert self.launch(*self.settings(base, data, calm), config=config).returncode == 0
        command = [sys.executable, str(ROOT / "train" / "sft.py"), "--config", str(config)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(
            [*command, *self.settings(base, data, killed)], env=environment, stderr=subprocess.DEVNULL
        )
        while not (killed / "checkpoint-4" / "adapter_model.safetensors").exists():
            assert process.poll() is None, "it ended before it could be killed"
        process.kill()
        process.wait()
        done = self.launch(*self.settings(base, data, killed), config=config)
        assert done.returncode == 0, done.stderr
        assert "resuming from" in done.stderr
        assert self.losses(killed) == self.losses(calm)
        name = "adapter_model.safetensors"
        assert (killed / name).read_bytes() == (calm / name).read_bytes()

    def test_a_full_disk_ends_in_one_sentence_and_the_run_goes_on_later(self, base, data, tmp_path):
        out, config = tmp_path / "out", ROOT / "configs" / "quickstart" / "sft.yaml"
        command = [sys.executable, str(ROOT / "train" / "sft.py"), "--config", str(config)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

        def no_room():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))  # the adapter is larger

        done = subprocess.run(
            [*command, *self.settings(base, data, out)], env=environment, capture_output=True, text=True,
            preexec_fn=no_room, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 2
        assert "nothing more can be written" in done.stderr
        assert "Traceback" not in done.stderr
        assert sft.last_checkpoint(out) is None
        assert self.launch(*self.settings(base, data, out), config=config).returncode == 0

    @pytest.mark.training
    def test_two_processes_learn_as_one_with_the_same_global_batch(self, base, data, tmp_path):
        config = ROOT / "configs" / "quickstart" / "sft.yaml"
        one, two = tmp_path / "one", tmp_path / "two"
        common = {"train_sampling_strategy": "sequential", "save_steps": 6, "max_steps": 6}
        assert self.launch(*self.settings(base, data, one, **common), config=config).returncode == 0
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += [str(ROOT / "train" / "sft.py"), "--config", str(config)]
        command += self.settings(base, data, two, **{**common, "per_device_train_batch_size": 1})
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        assert self.losses(two) == pytest.approx(self.losses(one), abs=1e-4)

    def test_a_misspelt_key_ends_in_one_sentence(self, tmp_path):
        text = "model_path: a\ntrain_files: [b]\noutput_dir: c\nlora_rank: 8\n"
        (tmp_path / "sft.yaml").write_text(text, encoding="utf-8")
        done = self.launch("--use_cpu", "true", "--bf16", "false", config=tmp_path / "sft.yaml")
        assert done.returncode != 0
        assert "lora_rank" in done.stderr
        assert "Traceback" not in done.stderr
