"""SFT of a tiny random LLaVA: what is learnt from, what is refused, what is saved."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import samrag
from samrag.calls import Call, CallKind, Passage
from samrag.errors import UserError
from samrag.files import read_json, write_records
from samrag.miniworld import tiny_llava
from samrag.prompts import PromptStyle, render, template_hash
from samrag.replies import write
from samrag.schema import ChatMessage, SftRow
from samrag.training import sft, student
from samrag.training.collator import IGNORED, PixelCache, SftCollator
from samrag.training.sft_arguments import SftArguments

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
    return student.load_model_and_processor(str(base))


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
    return sft.load_rows(data / "sft.jsonl")


def run_preflight(rows, root, loaded, **limits):
    model, processor = loaded
    pixels = PixelCache(processor.image_processor, 1 << 20)
    return sft.preflight(rows, root, processor, model, pixels, **limits), pixels


def make_trainer(rows, data, loaded, folder, arguments=None, **settings):
    from trl import SFTConfig

    arguments = arguments or SftArguments(model_path="x", train_file="x", lora_r=16, lora_alpha=32)
    settings = {"max_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-2, **settings}
    config = SFTConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, max_length=None,
        activation_checkpointing=False, **{"save_strategy": "no", **settings},
    )  # fmt: skip
    checked, pixels = run_preflight(rows, data, loaded)
    return sft.build_trainer(*loaded, config, arguments, pixels, checked), checked


def collate(rows, data, loaded):
    checked, pixels = run_preflight(rows, data, loaded)
    pad = loaded[1].tokenizer.pad_token_id
    return SftCollator(pixels, pad)([checked.dataset[i] for i in range(len(checked.dataset))])


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

    def test_an_image_outside_the_folder_is_refused(self, rows, data):
        with pytest.raises(UserError, match="leaves the data folder"):
            sft.to_dataset([dataclasses.replace(rows[2], images=("../red.png",))], data)

    def test_a_limit_takes_rows_from_the_whole_file(self, rows):
        assert sft.spread(rows, 2) == [rows[0], rows[2]]
        assert sft.spread(rows, 0) == rows

    def test_prompts_render_to_the_stored_text(self, rows, data, loaded):
        processor = loaded[1]
        for row, example in zip(rows, sft.to_dataset(rows, data), strict=True):
            text = processor.apply_chat_template(example["prompt"], tokenize=False)
            assert text == f"<s>USER: {row.messages[0].content}\nASSISTANT:"
            assert len(example["images"]) == len(row.images)


class TestLabels:
    def test_loss_is_on_the_reply_and_its_stop_token_alone(self, rows, data, loaded):
        tokenizer = loaded[1].tokenizer
        for row, labels in zip(rows, collate(rows, data, loaded)["labels"], strict=True):
            text = tokenizer.decode(labels[labels != IGNORED])
            assert text == f" {row.messages[-1].content}</s>"

    def test_image_tokens_are_never_labels_and_match_the_features(self, rows, data, loaded):
        model, processor = loaded
        batch = collate(rows, data, loaded)
        assert not (batch["labels"] == processor.image_token_id).any()
        assert (batch["input_ids"] == processor.image_token_id).sum(1).tolist() == [0, 0, 16, 16]
        assert torch.isfinite(model(**batch).loss)

    def test_training_prompts_have_the_ids_of_inference(self, rows, data, loaded):
        checked, _ = run_preflight(rows, data, loaded)
        for row, kept in zip(rows, checked.dataset, strict=True):
            image = [{"type": "image", "image": Image.open(data / name)} for name in row.images]
            before, _, after = row.messages[0].content.partition("<image>")
            content = [{"type": "text", "text": before}, *image, {"type": "text", "text": after}]
            output = loaded[1].apply_chat_template(
                [{"role": "user", "content": content}], tokenize=True, add_generation_prompt=True, return_dict=True
            )
            assert kept["input_ids"][: kept["label_start"]] == list(output["input_ids"][0])
            assert kept["input_ids"].count(loaded[1].tokenizer.bos_token_id) == 1

    def test_batches_and_loss_equal_trl_s_own(self, rows, data, loaded):
        from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

        model, processor = loaded
        model.eval()
        theirs = DataCollatorForVisionLanguageModeling(processor, max_length=None, completion_only_loss=True)
        ours = collate(rows, data, loaded)
        wanted = theirs([dict(example) for example in sft.to_dataset(rows, data)])
        for name in ("input_ids", "attention_mask", "labels"):
            assert torch.equal(ours[name], wanted[name])
        losses = [model(**{k: batch[k] for k in ours}).loss.item() for batch in (ours, wanted)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)


class TestPreflight:
    def test_a_long_prompt_is_left_out_and_counted(self, rows, data, loaded):
        long = Call(CallKind.IS_REL_TEXT, QUESTION, (Passage("Club", "word " * 400),))
        checked, _ = run_preflight([*rows, make_row(long, "r", "True")], data, loaded, max_prompt_tokens=300)
        assert checked.excluded == {"with a prompt over 300 tokens": 1}
        assert len(checked.dataset) == 4
        assert checked.rows["is_rel_text"] == {"True": 1}

    def test_no_row_that_fits_is_an_error(self, rows, data, loaded):
        with pytest.raises(UserError, match=r"none of 4 rows can be learnt.*4 over 20 tokens"):
            run_preflight(rows, data, loaded, max_tokens=20, max_prompt_tokens=1000)

    def test_rows_beyond_the_models_context_are_left_out(self, rows, data, loaded):
        long = Call(CallKind.IS_REL_TEXT, QUESTION, (Passage("Club", "word " * 1500),))
        checked, _ = run_preflight([*rows, make_row(long, "r", "True")], data, loaded)
        assert sum(checked.excluded.values()) == 1

    @pytest.mark.parametrize("reply", [" ", "a</s>b"])
    def test_rows_without_one_clear_target_are_left_out(self, rows, data, loaded, reply):
        messages = (rows[0].messages[0], ChatMessage("assistant", reply))
        checked, _ = run_preflight([*rows, dataclasses.replace(rows[0], messages=messages)], data, loaded)
        assert sum(checked.excluded.values()) == 1

    def test_a_processor_that_miscounts_image_tokens_is_refused(self, rows, data, loaded):
        loaded[1].num_additional_image_tokens = 0
        with pytest.raises(UserError, match="15 tokens in the prompt but 16 features"):
            run_preflight(rows, data, loaded)

    def test_a_processor_with_another_template_is_refused(self, rows, data, loaded, monkeypatch):
        wrong = [1] + [loaded[1].image_token_id] * 16
        monkeypatch.setattr(sft, "inference_ids", lambda *arguments: wrong)
        with pytest.raises(UserError, match="other tokens in training than at inference"):
            run_preflight(rows, data, loaded)


class TestModel:
    def test_old_processors_are_completed_from_the_model(self, base, tmp_path):
        for path in base.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        config = read_json(tmp_path / "processor_config.json")
        del config["patch_size"], config["vision_feature_select_strategy"]
        (tmp_path / "processor_config.json").write_text(json.dumps(config), encoding="utf-8")
        (tmp_path / "chat_template.jinja").unlink()
        _, processor = student.load_model_and_processor(str(tmp_path))
        assert (processor.patch_size, processor.vision_feature_select_strategy) == (8, "default")
        assert processor.chat_template == tiny_llava.chat_template()

    def test_a_model_without_processor_is_refused(self, base, tmp_path):
        for name in ("config.json", "model.safetensors"):
            (tmp_path / name).write_bytes((base / name).read_bytes())
        with pytest.raises(UserError, match="no usable processor"):
            student.load_model_and_processor(str(tmp_path))

    def test_a_missing_folder_is_refused(self):
        with pytest.raises(UserError, match="is no folder"):
            student.load_model_and_processor("./nowhere/at/all")

    def test_the_adapter_names_its_base_by_a_relative_path(self, base, monkeypatch):
        monkeypatch.chdir(base.parent)
        model, _ = student.load_model_and_processor(str(base))
        assert model.name_or_path == base.name

    def test_the_fingerprint_tells_weights_apart(self, base, tmp_path):
        for path in base.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        assert student.model_fingerprint(tmp_path) == student.model_fingerprint(base)
        data = bytearray((tmp_path / "model.safetensors").read_bytes())
        data[-1] ^= 1
        (tmp_path / "model.safetensors").write_bytes(bytes(data))
        assert student.model_fingerprint(tmp_path) != student.model_fingerprint(base)


@pytest.mark.training
class TestTraining:
    def test_the_adapter_lies_in_the_language_model_alone(self, rows, data, loaded, tmp_path):
        trainer, _ = make_trainer(rows, data, loaded, tmp_path)
        names = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
        assert len(names) == 2 * 7 * 2  # layers, projections, A and B
        assert all("language_model" in name for name in names)

    def test_unfrozen_parts_get_an_adapter_too(self, rows, data, loaded, tmp_path):
        arguments = SftArguments("x", "x", freeze_vision_tower=False, freeze_multi_modal_projector=False)
        trainer, _ = make_trainer(rows, data, loaded, tmp_path, arguments)
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

        trainer, _ = make_trainer(rows, data, loaded, tmp_path)
        gradients = Gradients()
        trainer.add_callback(gradients)
        trainer.train()
        assert gradients.seen == [(0, 14), (14, 14)]  # B is 0 at first, so A gets its gradient at the second step

    def test_an_overfit_student_repeats_the_replies_and_stops(self, rows, data, loaded, tmp_path):
        processor = loaded[1]
        trainer, checked = make_trainer(rows, data, loaded, tmp_path, max_steps=160, lr_scheduler_type="cosine")
        trainer.train()
        trainer.model.eval()
        _, pixels = run_preflight(rows, data, loaded)
        for row, kept in zip(rows, checked.dataset, strict=True):
            prompt = torch.tensor([kept["input_ids"][: kept["label_start"]]])
            images = {"pixel_values": torch.stack([pixels[path] for path in kept["images"]])} if kept["images"] else {}
            output = trainer.model.generate(
                input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=60, do_sample=False, **images
            )
            assert processor.tokenizer.decode(output[0, prompt.shape[1] :]) == f" {row.messages[-1].content}</s>"

    def test_a_saved_adapter_gives_the_probe_back_and_a_lost_one_is_noticed(self, base, rows, data, loaded, tmp_path):
        from peft import PeftModel

        trainer, checked = make_trainer(rows, data, loaded, tmp_path, max_steps=5)
        trainer.train()
        student.save(trainer, loaded[1], tmp_path, checked.summary(), student.model_fingerprint(base))
        facts = read_json(tmp_path / student.ADAPTER_FILE)
        assert facts["template"] == template_hash(PromptStyle.STUDENT)
        assert facts["training"]["rows"]["answer"] == {"blue": 1}

        plain, processor = student.load_model_and_processor(str(base))
        tuned = PeftModel.from_pretrained(plain, tmp_path)
        student.check_adapter(tuned, processor, tmp_path)
        assert student.probe_logits(tuned, processor) == pytest.approx(facts["probe"]["logits"], abs=1e-4)
        with tuned.disable_adapter(), pytest.raises(UserError, match="no effect"):
            student.check_adapter(tuned, processor, tmp_path)

    def test_a_resumed_run_ends_as_the_whole_run(self, base, rows, data, tmp_path):
        def adapter(folder, resume=None, **settings):
            settings = {
                "max_steps": 6, "per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 3,
                "train_sampling_strategy": "group_by_length", "logging_steps": 1, **settings,
            }  # fmt: skip
            many = [dataclasses.replace(row, question_id=str(i)) for i in range(2) for row in rows]
            trainer, _ = make_trainer(many, data, student.load_model_and_processor(str(base)), folder, **settings)
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


class TestArguments:
    @pytest.mark.parametrize("wrong", [{"lora_r": 0}, {"lora_dropout": 1.0}, {"eval_rows": -1}, {"num_threads": 0}])
    def test_impossible_values_name_their_field(self, wrong):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            SftArguments(model_path="x", train_file="x", **wrong)

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
            "--train_file",
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

    def test_a_misspelt_key_ends_in_one_sentence(self, tmp_path):
        text = "model_path: a\ntrain_file: b\noutput_dir: c\nlora_rank: 8\n"
        (tmp_path / "sft.yaml").write_text(text, encoding="utf-8")
        done = self.launch("--use_cpu", "true", "--bf16", "false", config=tmp_path / "sft.yaml")
        assert done.returncode != 0
        assert "lora_rank" in done.stderr
        assert "Traceback" not in done.stderr
