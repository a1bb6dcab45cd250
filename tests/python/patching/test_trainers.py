"""Whole runs of transformers' Trainer and TRL's SFTTrainer: patched and unpatched, interrupted and resumed."""

import pytest
import torch
import transformers

import nybble

from ..trainer_runs import outcome
from .models import (
    FAMILIES,
    LINEARS,
    LOSS_TOLERANCE,
    VOCAB,
    assert_same,
    load,
    qlora,
    spoil,
    worst_difference,
)

STEPS = 3


def examples() -> list[dict]:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(3, VOCAB, (8, 12), generator=generator)
    return [{"input_ids": row.tolist(), "attention_mask": [1] * 12, "labels": row.tolist()} for row in rows]


def settings(kind, folder, **more):
    return kind(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        max_steps=STEPS,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy=more.pop("save_strategy", "no"),
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        dataloader_pin_memory=False,
        seed=1,
        **more,
    )


def run_trainer(model, folder, resume=None, **more):
    arguments = settings(transformers.TrainingArguments, folder, **more)
    collate = transformers.default_data_collator
    trainer = transformers.Trainer(model, arguments, train_dataset=examples(), data_collator=collate)
    trainer.train(resume_from_checkpoint=resume)
    return outcome(trainer, STEPS)


def test_trainer(dense, tmp_path):
    expected = run_trainer(qlora(dense("Qwen2")), tmp_path)
    found = run_trainer(qlora(dense("Qwen2"), mode="dequant", before=True), tmp_path)
    assert_same(found, expected, at_least=6 + 2 * LINEARS)
    losses = [name for name in expected if name.startswith("loss")]

    def apart(model):
        found = run_trainer(model, tmp_path)
        return worst_difference({name: found[name] for name in losses}, {name: expected[name] for name in losses})

    assert apart(qlora(dense("Qwen2"), mode="auto")) <= LOSS_TOLERANCE
    wrong = qlora(dense("Qwen2"), mode="auto")
    spoil(wrong)
    assert apart(wrong) > LOSS_TOLERANCE


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_both_trainers_give_every_family_the_numbers_of_bitsandbytes(dense, tmp_path, family, before):
    """before: patched before PEFT, else after. One layer, as there are many runs."""
    for run in (run_trainer, lambda *args: run_sft(*args)[0]):
        expected = run(qlora(dense(family), layers=1), tmp_path)
        found = run(qlora(dense(family), mode="dequant", before=before, layers=1), tmp_path)
        assert_same(found, expected, at_least=2 * STEPS + LINEARS)


def test_trainer_in_mixed_precision_with_accumulated_gradients(dense, tmp_path):
    outcomes = []
    for mode in (None, "dequant"):
        model = qlora(dense("Mistral"), mode=mode, compute_dtype=torch.float32)
        outcomes.append(run_trainer(model, tmp_path, bf16=True, gradient_accumulation_steps=2))
    assert_same(outcomes[1], outcomes[0], at_least=6 + 2 * LINEARS)


def test_an_interrupted_run_resumes_to_the_same_adapters(dense, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2}
    whole = run_trainer(qlora(dense(), mode="dequant"), tmp_path / "whole", **options)
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    assert (checkpoint / "adapter_model.safetensors").is_file()
    for mode in ("dequant", None):  # a patched run's checkpoint serves an unpatched run too
        resumed = run_trainer(qlora(dense(), mode=mode), tmp_path / f"again {mode}", resume=str(checkpoint), **options)
        assert_same(resumed, whole, at_least=6 + 2 * LINEARS)


def tokenizer():
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    from tokenizers import Tokenizer, models

    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="</s>"
    )


def run_sft(model, folder, **more):
    trl = pytest.importorskip("trl", reason="TRL is not installed here (requirements/dev.txt has it)")
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"input_ids": example["input_ids"]} for example in examples()])
    arguments = settings(trl.SFTConfig, folder, max_length=12, dataset_num_proc=None)
    trainer = trl.SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer(), **more)
    trainer.train()
    return outcome(trainer, STEPS), trainer.model


def test_sft_trainer_with_a_peft_model(dense, tmp_path):
    expected, _ = run_sft(qlora(dense()), tmp_path)
    found, _ = run_sft(qlora(dense(), mode="dequant"), tmp_path)
    assert_same(found, expected, at_least=6 + 2 * LINEARS)
    wrong = qlora(dense(), mode="dequant")
    spoil(wrong)
    with pytest.raises(AssertionError):
        assert_same(run_sft(wrong, tmp_path)[0], expected, at_least=1)


def test_sft_trainer_that_makes_the_adapters_itself(dense, tmp_path):
    import peft

    outcomes = []
    for mode in (None, "dequant"):
        model = load(dense())
        if mode:
            nybble.patch(model, mode=mode)
        torch.manual_seed(0)
        config = peft.LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
        )
        nybble.reset_path_counters()
        outcomes.append(run_sft(model, tmp_path, peft_config=config)[0])
        assert bool(nybble.path_counters()["dequant"]["grad_input"]) == bool(mode)
    assert_same(outcomes[1], outcomes[0], at_least=6 + 8)
