"""Fixtures for tests in verl's own Python: its configuration, a tiny tokenizer, and its queue."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("verl") is None:
    collect_ignore_glob = ["test_*.py"]  # `test_verl_suite.py` says so, and what to do

WORDS = {"<pad>": 0, "<eos>": 1, **{f"word{number}": number for number in range(2, 13)}}


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer(models.WordLevel(WORDS, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="<eos>")


@pytest.fixture
def configured(tokenizer: Any, tmp_path: Path) -> Callable[..., Any]:
    """Return the configuration of verl's PPO trainer with command-line overrides."""
    from hydra import compose, initialize_config_dir

    tokenizer.save_pretrained(tmp_path / "model")
    folder = resources.files("verl.trainer") / "config"

    def made(*changes: str) -> Any:
        with initialize_config_dir(str(folder), version_base=None):
            return compose("ppo_trainer", overrides=[f"actor_rollout_ref.model.path={tmp_path / 'model'}", *changes])

    return made


@pytest.fixture(scope="session")
def queue() -> Iterator[Any]:
    """verl's TransferQueue: controller, storage and client over sockets, without Ray.

    Ray only starts their processes; here they run in threads of this one.
    """
    import transfer_queue
    from omegaconf import OmegaConf
    from transfer_queue import interface
    from transfer_queue.client import TransferQueueClient
    from transfer_queue.controller import TransferQueueController
    from transfer_queue.storage.simple_storage import SimpleStorageUnit

    config = OmegaConf.merge(
        OmegaConf.create({}, flags={"allow_objects": True}),
        OmegaConf.load(str(resources.files("transfer_queue") / "config.yaml")),
    )
    controller = TransferQueueController.__ray_metadata__.modified_class()
    config.controller.zmq_info = controller.get_zmq_server_info()
    stored = config.backend.SimpleStorage
    stored.num_data_storage_units = 1
    storage = SimpleStorageUnit.__ray_metadata__.modified_class(OmegaConf.to_container(stored))
    stored.zmq_info = {0: storage.get_zmq_server_info()}
    controller.store_config(config)
    client = TransferQueueClient(client_id="tests", controller_info=config.controller.zmq_info)
    client.initialize_storage_manager(manager_type="SimpleStorage", config=stored)
    interface._TQ_CLIENT = client
    yield transfer_queue
    interface._TQ_CLIENT = None


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
