"""Whole runs on a streamed model: saves compared at every step, resuming, evaluation, SFTTrainer, DPOTrainer."""

import accelerate
import peft
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import has_offloaded_params
from safetensors.torch import load_file
from tiny_models import LAYERS, assert_equal, checkpointed, resident_model, streamed_model, with_adapters
from trainer_runs import outcome

import nybble

LATE = {"poison": True, "land_at_wait": True}
STEPS, VOCAB = 3, 96
CONFIG = dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def settings(kind, store, folder, **more):
    return kind(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        max_steps=STEPS,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        logging_steps=1,
        report_to=[],
        use_cpu=store.device.type == "cpu",
        bf16=False,
        disable_tqdm=True,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        dataloader_pin_memory=False,
        seed=1,
        **({"save_strategy": "no"} | more),
    )


def examples():
    rows = torch.randint(3, VOCAB, (8, 12), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row, "labels": row} for row in rows]


class ReadBack(transformers.TrainerCallback):
    """At every save: the file holds the adapters of that moment, under the names that PEFT gives them."""

    def __init__(self):
        self.saves = 0

    def on_save(self, args, state, control, model=None, **kwargs):
        saved = load_file(f"{args.output_dir}/checkpoint-{state.global_step}/adapter_model.safetensors")
        expected = {n.replace(".default", ""): p for n, p in model.named_parameters() if p.requires_grad}
        assert saved.keys() == expected.keys() and len(saved) == 4 * LAYERS
        assert all(torch.equal(saved[name], expected[name].detach().cpu()) for name in saved)
        self.saves += 1


@pytest.mark.parametrize("activations", ["recompute", 2])
def test_saves_evaluation_and_resuming_equal_a_resident_run(stores, tmp_path, activations):
    store = stores()
    options = dict(save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1)
    found = {}
    for kind in ("resident", "streamed"):
        make = resident_model if kind == "resident" else lambda s: streamed_model(s, activations=activations, **LATE)
        model = with_adapters(make(store))
        arguments = settings(transformers.TrainingArguments, store, tmp_path / kind, **options)
        check = ReadBack()
        trainer = transformers.Trainer(
            model, arguments, train_dataset=examples(), eval_dataset=examples()[:3], callbacks=[check]
        )
        trainer.train()
        assert check.saves == STEPS
        found[kind] = outcome(trainer, STEPS)
    assert_equal(found["streamed"], found["resident"], at_least=4 * LAYERS + 3 * STEPS)
    for step in range(1, STEPS + 1):  # the files of both runs: same names, same bytes
        files = [load_file(tmp_path / kind / f"checkpoint-{step}" / "adapter_model.safetensors") for kind in found]
        assert_equal(files[1], files[0], at_least=4 * LAYERS)
    arguments = settings(transformers.TrainingArguments, store, tmp_path / "again", **options)
    again = transformers.Trainer(
        with_adapters(streamed_model(store, activations=activations, **LATE)),
        arguments,
        train_dataset=examples(),
        eval_dataset=examples()[:3],
    )
    again.train(resume_from_checkpoint=str(tmp_path / "streamed" / "checkpoint-2"))
    assert_equal(outcome(again, STEPS), found["resident"], at_least=4 * LAYERS + 3 * STEPS)


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")


def words(row) -> str:
    return " ".join(f"w{int(token)}" for token in row)


def run_sft(trl, datasets, model, store, folder):
    rows = datasets.Dataset.from_list([{"text": words(example["input_ids"])} for example in examples()])
    arguments = settings(trl.SFTConfig, store, folder, max_length=16, dataset_num_proc=None)
    torch.manual_seed(0)
    config = peft.LoraConfig(**CONFIG, init_lora_weights=False)
    trainer = trl.SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer(), peft_config=config)
    trainer.train()
    return outcome(trainer, STEPS)


def run_dpo(trl, datasets, model, store, folder):
    """The reference is the model itself with its adapters off."""
    rows = [example["input_ids"] for example in examples()]
    pairs = [
        {"prompt": words(row[:4]), "chosen": " " + words(row[4:9]), "rejected": " " + words(row[9:])} for row in rows
    ]
    arguments = settings(trl.DPOConfig, store, folder, max_length=16, dataset_num_proc=None)
    torch.manual_seed(0)
    config = peft.LoraConfig(**CONFIG, init_lora_weights=False)
    trainer = trl.DPOTrainer(
        model,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(pairs),
        processing_class=tokenizer(),
        peft_config=config,
    )
    assert trainer.ref_model is None and list(trainer.model.peft_config) == ["default"]
    trainer.train()
    return outcome(trainer, STEPS)


@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("run", [run_sft, run_dpo])
def test_trl_trains_a_streamed_model_as_a_resident_one(stores, tmp_path, run, activations):
    trl = pytest.importorskip("trl", reason="TRL is not installed here (requirements/dev.txt has it)")
    datasets = pytest.importorskip("datasets")
    store = stores()
    expected, found = (
        run(trl, datasets, make(store), store, tmp_path / name)
        for name, make in (
            ("resident", resident_model),
            ("streamed", lambda s: streamed_model(s, activations=activations, **LATE)),
        )
    )
    assert_equal(found, expected, at_least=4 * LAYERS + 2 * STEPS)
    assert all(not torch.equal(found[f"loss {i}"], found[f"loss {i + 1}"]) for i in (1, 2))
    assert nybble.memory_stats()["refills"] > 0


def accelerated(model, store) -> dict:
    """A loop as accelerate's pages write it: accumulation of two, clipped gradients."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=store.device.type == "cpu", gradient_accumulation_steps=2)
    checkpointed(with_adapters(model))
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    rows = torch.utils.data.DataLoader([example["input_ids"] for example in examples()], batch_size=2)
    model, optimiser, rows = accelerator.prepare(model, optimiser, rows)
    assert not accelerator.verify_device_map(model)  # of a model that is spread over devices
    for name, module in model.named_modules():
        assert not hasattr(module, "_hf_hook") and not has_offloaded_params(module), name
    assert {parameter.device.type for parameter in model.parameters()} == {store.device.type}
    found = {}
    for epoch in range(2):
        for index, ids in enumerate(rows):
            with accelerator.accumulate(model):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    found[f"norm {epoch} {index}"] = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimiser.step()
                optimiser.zero_grad()
            found[f"loss {epoch} {index}"] = loss.detach()
    return found | {
        n: p.detach().clone() for n, p in accelerator.unwrap_model(model).named_parameters() if p.requires_grad
    }


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_accelerate_prepares_and_trains_a_streamed_model_as_a_resident_one(stores, activations):
    store = stores()
    expected = accelerated(resident_model(store), store)
    streamed = streamed_model(store, activations=activations, **LATE)
    assert_equal(accelerated(streamed, store), expected, at_least=4 * LAYERS + 12)
    assert not torch.equal(expected["loss 0 0"], expected["loss 1 0"])
    assert nybble.memory_stats(streamed)["refills"] > 8 * LAYERS
