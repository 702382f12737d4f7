"""Results of verl's FSDP engine on a CPU for an exported batch, compared with reward-kit's; prints JSON.

A process of its own, in the environment of `cpu_platform`: verl looks for its platform while it is imported.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from typing import Any

import torch
import torch.distributed
import verl.models.transformers.monkey_patch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import ActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from reward_kit.integrations.verl.data_proto import to_data_proto
from reward_kit.integrations.verl.estimators import compute_advantage
from reward_kit.rl.losses import ppo_clip_loss
from tests.integrations.verl.conftest import WORDS
from tests.integrations.verl_episodes import collected

# verl 0.9.1 looks in TRL for a class that TRL 1 no longer has, and both are installed here.
verl.models.transformers.monkey_patch.is_trl_available = lambda: False


def tiny_model(folder: str) -> Any:
    """Return a random model with the files that verl expects."""
    words = Tokenizer(models.WordLevel(WORDS, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    config = Qwen2Config(vocab_size=16, max_position_embeddings=128, pad_token_id=0, eos_token_id=1, **sizes, **heads)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return Qwen2ForCausalLM.from_pretrained(folder, attn_implementation="eager")


def engine_of(folder: str) -> Any:
    """Return verl's engine, in float32 throughout."""
    precision = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
    engine = FSDPEngineWithLMHead(
        model_config=HFModelConfig(
            path=folder,
            use_remove_padding=False,
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "eager"},
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2", use_torch_compile=False, model_dtype="fp32", mixed_precision=precision
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-2),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def for_engine(data: Any, **more: Any) -> Any:
    """Return the batch as verl's trainer passes it to its workers."""
    batch = left_right_2_no_padding(data.select(non_tensor_batch_keys=[]).to_tensordict())
    options = dict.fromkeys(("use_remove_padding", "use_dynamic_bsz", "use_fused_kernels", "calculate_entropy"), False)
    sizes = {"micro_batch_size_per_gpu": len(data), "global_batch_size": len(data)}
    tensordict_utils.assign_non_tensor(batch, temperature=1.0, **options, **sizes, **more)
    return batch


def logprobs_by(engine: Any, data: Any) -> torch.Tensor:
    """Return log-probabilities (B,C) computed by verl's engine."""
    batch = for_engine(data, compute_loss=False)
    with engine.eval_mode():
        found = engine.infer_batch(batch)
    return no_padding_2_padding(found["model_output"]["log_probs"], batch).detach()


def token_logprobs(model: Any, data: Any) -> torch.Tensor:
    """Return log-probabilities (B,C) of the same model without verl."""
    ids, first = data.batch["input_ids"], data.batch["prompts"].shape[1]
    found = model(ids, attention_mask=data.batch["attention_mask"], position_ids=data.batch["position_ids"]).logits
    return found[:, first - 1 : -1].log_softmax(-1).gather(-1, ids[:, first:, None])[..., 0]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    given = collected(1)
    data = to_data_proto(given.episodes, given.steps, pad_token_id=0, scores=given.scores, unscored="mask")
    data.batch["token_level_rewards"] = data.batch["token_level_scores"]
    data = compute_advantage(data, "reward_kit_gigpo", config={"gamma": 0.9})
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(folder)
        store = torch.distributed.FileStore(f"{folder}/store", 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        engine = engine_of(folder)
        mask = data.batch["response_mask"]
        theirs, ours = logprobs_by(engine, data), token_logprobs(model, data)
        told: dict[str, Any] = {"rows": len(data), "logprobs": float(((theirs - ours) * mask).abs().max())}
        data.batch["old_log_probs"] = theirs + 0.3 * torch.randn(theirs.shape)
        config = ActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
        with engine.train_mode():
            step = engine.train_batch(for_engine(data), loss_function=functools.partial(ppo_loss, config))
        loss = ppo_clip_loss(ours, data.batch["old_log_probs"], data.batch["advantages"], mask, dual_clip=3.0).loss
        loss.backward()
        norm = torch.stack([weights.grad.norm() for weights in model.parameters()]).norm()
        told |= {"loss": [sum(step["loss"]), float(loss)], "norm": [step["metrics"]["grad_norm"], float(norm)]}
        moved = logprobs_by(engine, data) - theirs
        told["moved_towards_advantages"] = float((moved * data.batch["advantages"] * mask).sum())
        torch.distributed.destroy_process_group()
    print(json.dumps(told))


if __name__ == "__main__":
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    main()
