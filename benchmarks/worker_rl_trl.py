"""TRL's GRPOTrainer with transformers' generate, in the peer's own venv. `spec["arguments"]` are GRPOConfig's, over those below."""

from __future__ import annotations

import pathlib

from datasets import load_dataset
from measure import PhaseMeter, leave_world, read_arguments
from reward import even
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def reward(prompts, completions, **columns) -> list[float]:
    return [even(prompt, completion, {}) for prompt, completion in zip(prompts, completions, strict=True)]


class Timed(GRPOTrainer):
    """Times the phases of an iteration: what `_prepare_inputs` does beside sampling and log-probs is the rest."""

    meter: PhaseMeter

    def _prepare_inputs(self, inputs):
        self.meter.switch(PhaseMeter.REST)
        found = super()._prepare_inputs(inputs)
        self.meter.switch("update")  # until the end of the step
        return found

    def _generate(self, *args, **kwargs):
        return self.meter.within("generation", super()._generate)(*args, **kwargs)

    def _generate_and_score_completions(self, inputs):
        of_update = self._get_per_token_logps_and_entropies
        self._get_per_token_logps_and_entropies = self.meter.within("log-probs", of_update)
        try:
            return super()._generate_and_score_completions(inputs)
        finally:
            del self._get_per_token_logps_and_entropies


class Clock(TrainerCallback):
    def __init__(self, meter: PhaseMeter, steps_per_iteration: int) -> None:
        self.meter, self.steps_per_iteration, self.row = meter, steps_per_iteration, {}

    def on_train_begin(self, args, state, control, **kwargs):
        self.meter.mark()

    def on_step_end(self, args, state, control, **kwargs):
        self.meter.switch(PhaseMeter.REST)

    def on_log(self, args, state, control, logs, **kwargs):
        self.row.update(logs)
        if "train_runtime" not in logs and state.global_step % self.steps_per_iteration == 0:
            self.meter.metrics.append({"length": self.row["completions/mean_length"], "reward": self.row["reward"]})
            self.meter.step()


def main() -> None:
    spec, out = read_arguments()
    folder, steps = pathlib.Path(spec["folder"]), spec["steps_per_iteration"]
    leave_world()
    meter = PhaseMeter()
    config = GRPOConfig(
        output_dir=str(folder / "trl"), use_cpu=True,
        max_steps=spec["iterations"] * steps, learning_rate=spec["lr"], lr_scheduler_type="constant", adam_beta2=0.95,
        per_device_train_batch_size=spec["sequences"] // steps, gradient_accumulation_steps=1, steps_per_generation=steps,
        num_generations=spec["samples"], max_completion_length=spec["new_tokens"], temperature=1.0, beta=spec["kl"],
        loss_type="grpo", shuffle_dataset=False, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True,
        dataloader_pin_memory=False, model_init_kwargs={"dtype": "float32"},
        **spec["arguments"],
    )  # fmt: skip
    rows = load_dataset(
        "json", data_files=str(folder / "prompts.jsonl"), split="train", cache_dir=str(folder / "cache")
    )
    trainer = Timed(
        model=str(folder / "model"), reward_funcs=reward, args=config, train_dataset=rows, callbacks=[Clock(meter, steps)]
    )  # fmt: skip
    trainer.meter = meter
    trainer.train()
    meter.write(out)


if __name__ == "__main__":
    main()
