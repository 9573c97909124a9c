"""What a run takes from the machine where its config is silent, and the refusal of one that is too large."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tailrace.cli import main
from tailrace.config import RunConfig, load_config
from tailrace.contracts.memory import GIB, ModelShape
from tailrace.drivers.assembly import machine
from tailrace.drivers.assembly.machine import (
    CUDA_BYTES,
    Machine,
    fit,
    held_at_once,
    host_limit,
    longest_sample,
    run_memory,
)
from tailrace.errors import ConfigError
from tailrace.model_folder import context_length

SMALL = Machine(cores=2, memory=24 * GIB, bfloat16="avx512_bf16")
GPU = Machine(2, 24 * GIB, "", 5 * GIB)
REPLICAS = "lower engine.replicas or trainer.replicas"
SMOLLM2 = ModelShape(
    num_parameters=134_515_008,
    num_layers=30,
    hidden_size=576,
    num_heads=9,
    num_kv_heads=3,
    head_size=64,
    mlp_size=1536,
    vocabulary=49_152,
    context_tokens=8192,
    block_parameters=3_540_096,
    outside_parameters=28_312_128,
)
"""SmolLM2-135M."""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A run with no setting but model, data, reward, length and schedule."""
    monkeypatch.setattr(ModelShape, "read", lambda path: SMOLLM2)
    tiny = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_attention_heads=1)
    tiny.num_hidden_layers, tiny.max_position_embeddings = 1, 8192
    LlamaForCausalLM(tiny).save_pretrained(tmp_path / "model")
    path = tmp_path / "run.toml"
    path.write_text(
        """
        run = { rounds = 1, group_size = 8 }
        schedule = { name = "serial", groups_per_round = 8, groups_per_step = 8 }
        model = { path = "model" }
        data = { kind = "rows", path = "rows.jsonl" }
        reward = { function = "rewards.py:exact" }
        sampling = { max_completion_tokens = 32 }
        """
    )
    return load_config(path)


def changed(config: RunConfig, **sections: dict[str, Any]) -> RunConfig:
    tree = config.model_dump(mode="json", exclude_unset=True)
    return RunConfig.model_validate(tree | {name: tree.get(name, {}) | sections[name] for name in sections})


def fitted(config: RunConfig, machine: Machine = SMALL, *, overlaps: bool = False) -> RunConfig:
    return fit(config, machine, prompt_tokens=50, overlaps=overlaps).config


def warning(config: RunConfig, machine: Machine) -> str:
    return fit(config, machine, prompt_tokens=50, overlaps=False).warning


@pytest.mark.parametrize(
    ("flag", "dtype"), [("amx_bf16", "bfloat16"), ("avx512_bf16", "bfloat16"), ("", "float32")]
)
def test_bfloat16_is_for_processors_that_compute_it(config: RunConfig, flag: str, dtype: str) -> None:
    found = fitted(config, Machine(2, 24 * GIB, flag))
    assert (found.trainer.dtype, found.engine.dtype) == (dtype, dtype)


@pytest.mark.parametrize(("computes", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_on_a_gpu_its_own_capability_counts(config: RunConfig, computes: bool, dtype: str) -> None:
    gpu = changed(config, trainer={"device": "cuda"}, engine={"device": "cuda"})
    found = fitted(gpu, Machine(2, 24 * GIB, "", 80 * GIB, computes))
    assert (found.trainer.dtype, found.engine.dtype) == (dtype, dtype)
    assert found.trainer.max_tokens_per_microbatch == 16_384
    assert (found.trainer.threads, found.engine.threads) == (1, 1)


@pytest.mark.parametrize(
    ("cores", "overlaps", "replicas", "ranks", "threads"),
    [
        (2, False, 1, 1, (2, 2)),
        (2, True, 1, 1, (1, 1)),
        (16, False, 4, 2, (4, 8)),
        (16, True, 4, 2, (2, 4)),
        (1, True, 1, 1, (1, 1)),
        (2, False, 4, 1, (1, 2)),
    ],
)
def test_engines_and_trainer_take_turns_on_all_cores_or_share_them(
    config: RunConfig, cores: int, overlaps: bool, replicas: int, ranks: int, threads: tuple[int, int]
) -> None:
    several = changed(config, engine={"replicas": replicas}, trainer={"ranks": ranks})
    found = fitted(several, Machine(cores, 64 * GIB), overlaps=overlaps)
    assert (found.engine.threads, found.trainer.threads) == threads


def test_listed_cores_are_the_threads_of_their_processes(config: RunConfig) -> None:
    listed = changed(config, placement={"engines": [[0]], "trainer": [[1, 2, 3]]})
    found = fitted(listed, Machine(8, 24 * GIB))
    assert (found.engine.threads, found.trainer.threads) == (1, 3)
    half = changed(config, placement={"trainer": [[1, 2, 3]]})
    found = fitted(half, Machine(8, 24 * GIB), overlaps=True)
    assert (found.engine.threads, found.trainer.threads) == (5, 3)


def test_joined_servers_leave_the_cores_to_the_trainer(config: RunConfig) -> None:
    joined = changed(config, engine={"kind": "vllm", "urls": ["http://nowhere:1"]})
    assert fitted(joined, overlaps=True).trainer.threads == 2


@pytest.mark.parametrize(("memory", "tokens"), [(24, 1024), (7.5, 512), (6.9, 256)])
def test_the_micro_batch_is_the_largest_that_fits(config: RunConfig, memory: float, tokens: int) -> None:
    waits = changed(config, trainer={"async_checkpoints": False}, sampling={"max_completion_tokens": 128})
    found = fitted(waits, Machine(2, int(memory * GIB), "avx512_bf16"))
    assert found.trainer.max_tokens_per_microbatch == tokens


def test_the_kv_cache_falls_when_no_micro_batch_fits(config: RunConfig) -> None:
    long = changed(config, engine={"max_num_seqs": 128}, sampling={"max_completion_tokens": 2000})
    assert fitted(long).engine.kv_cache_tokens == 262_144
    found = fitted(long, Machine(2, 10 * GIB, "avx512_bf16"))
    assert found.engine.kv_cache_tokens == 32_768


def test_what_the_config_sets_stays(config: RunConfig) -> None:
    trainer = {"dtype": "float32", "threads": 3, "max_tokens_per_microbatch": 100}
    engine = {"dtype": "float32", "threads": 4, "kv_cache_tokens": 10_000}
    found = fitted(changed(config, trainer=trainer, engine=engine))
    assert found.trainer.model_dump(include=set(trainer)) == trainer
    assert found.engine.model_dump(include=set(engine)) == engine
    assert fitted(found, Machine(64, 500 * GIB)) == found, "a choice is made once"


def test_a_server_that_is_joined_keeps_its_type(config: RunConfig) -> None:
    joined = changed(config, engine={"kind": "vllm", "urls": ["http://localhost:1"]})
    assert fitted(joined).engine.dtype == "float32"
    assert fitted(joined).trainer.dtype == "bfloat16"


def test_threads_that_are_set_leave_the_other_cores_to_the_other_side(config: RunConfig) -> None:
    machine = Machine(8, 24 * GIB, "avx512_bf16")
    given = fit(changed(config, engine={"threads": 6}), machine, prompt_tokens=50, overlaps=True)
    assert (given.config.engine.threads, given.config.trainer.threads) == (6, 2)
    assert list(given.remarks) == []


def test_a_written_config_leaves_the_choices_to_the_machine_that_runs_it(config: RunConfig) -> None:
    for chosen in (False, True):
        sections = tomllib.loads(config.toml(chosen=chosen))
        keys = {"dtype", "threads", "max_tokens_per_microbatch", "kv_cache_tokens"}
        assert bool(keys & sections["trainer"].keys() | keys & sections["engine"].keys()) == chosen


def test_threads_that_leave_cores_idle_are_named(config: RunConfig) -> None:
    one = changed(config, engine={"threads": 1}, trainer={"threads": 1})
    alone = fit(one, SMALL, prompt_tokens=50, overlaps=False)
    why = "of 2 cores; the schedule never trains while engines generate"
    assert list(alone.remarks) == [
        f"{name}.threads = 1 leaves cores idle: it could be 2, {why}" for name in ("engine", "trainer")
    ]
    assert list(fit(one, SMALL, prompt_tokens=50, overlaps=True).remarks) == []
    assert list(fit(config, SMALL, prompt_tokens=50, overlaps=False).remarks) == []


@pytest.mark.parametrize(
    ("sections", "memory", "part", "remedy"),
    [
        (
            {"trainer": {"max_tokens_per_microbatch": 16_384}},
            8,
            "1 x trainer: micro-batch ",
            "lower trainer.max_tokens_per_microbatch or sampling.max_completion_tokens, or set "
            "trainer.activation_checkpointing = true",
        ),
        (
            {
                "engine": {"kv_cache_tokens": 262_144},
                "sampling": {"max_completion_tokens": 4000},
                "trainer": {"activation_checkpointing": True},
            },
            8,
            "1 x engine: KV cache ",
            "lower engine.kv_cache_tokens or engine.max_num_seqs",
        ),
        (
            {"engine": {"replicas": 16, "max_num_seqs": 512}},
            8,
            "16 x engine: computation",
            "lower engine.max_num_seqs",
        ),
    ],
)
def test_a_run_that_may_not_fit_is_told_the_largest_part_and_how_it_becomes_smaller(
    config: RunConfig, sections: dict[str, Any], memory: float, part: str, remedy: str
) -> None:
    said = warning(changed(config, **sections), Machine(2, int(memory * GIB), "avx512_bf16"))
    assert said.startswith("the run may need ")
    assert f"GiB of host memory, and this machine has {memory:.1f} GiB; the largest part is {part}" in said
    assert remedy in said
    assert warning(changed(config, **sections), Machine(2, 99 * GIB, "avx512_bf16")) == ""


def test_only_a_run_whose_weights_and_optimizer_state_cannot_fit_is_refused(config: RunConfig) -> None:
    """The state of SmolLM2-135M takes 2.0 GiB in the trainer, and its weights 0.25 GiB in the engine."""
    fitted(config, Machine(2, int(2.4 * GIB), "avx512_bf16"))
    with pytest.raises(ConfigError) as caught:
        fitted(config, Machine(2, 2 * GIB, "avx512_bf16"))
    message = str(caught.value)
    assert message.startswith("model.path = ")
    assert "the run needs 2.3 GiB of host memory, and this machine has 2.0 GiB" in message
    assert "the largest part is 1 x trainer: optimizer 1.0 GiB" in message
    assert message.endswith("; choose a smaller model, set [trainer.lora] rank = 16, or " + REPLICAS)


def test_the_smallest_kv_cache_holds_one_sequence(config: RunConfig) -> None:
    long = changed(config, sampling={"max_completion_tokens": 8000}, data={"max_prompt_tokens": 100})
    fitted(config, Machine(2, int(2.4 * GIB), "avx512_bf16"))
    with pytest.raises(ConfigError, match=r"the run needs 2\.4 GiB of host memory"):
        fitted(long, Machine(2, int(2.4 * GIB), "avx512_bf16"))


def test_a_gpu_without_room_for_the_trainer_is_named(config: RunConfig) -> None:
    gpu = changed(config, trainer={"device": "cuda"}, engine={"device": "cuda"})
    with pytest.raises(ConfigError, match=r"of the memory of cuda, and this machine has 2\.0 GiB"):
        fitted(gpu, Machine(2, 24 * GIB, "", 2 * GIB))


def test_engines_and_trainer_on_one_gpu_share_its_memory(config: RunConfig) -> None:
    gpu = changed(config, trainer={"device": "cuda"}, engine={"device": "cuda"})
    apart = changed(gpu, engine={"device": "cuda:1"})
    machine = Machine(2, 24 * GIB, "", 5 * GIB)
    both, alone = (fitted(each, machine).trainer.max_tokens_per_microbatch for each in (gpu, apart))
    assert both < alone


@pytest.mark.parametrize(
    ("placement", "engine", "same_as"),
    [
        ({}, {"device": "cuda:0"}, "shared"),
        ({"engines": [[0]], "trainer": [[1]]}, {}, "apart"),
        ({"trainer": [[1]]}, {}, "apart"),
        ({"trainer": [[0]]}, {}, "shared"),
        ({"engines": [[0]], "trainer": [[0]], "kind": "colocated"}, {}, "apart"),
    ],
)
def test_what_a_gpu_has_room_for_follows_from_who_computes_on_it(
    config: RunConfig, placement: dict[str, Any], engine: dict[str, Any], same_as: str
) -> None:
    gpu = changed(config, trainer={"device": "cuda"}, engine={"device": "cuda"})
    same = gpu if same_as == "shared" else changed(gpu, engine={"device": "cuda:1"})
    given = changed(gpu, placement={"devices": "gpus"} | placement, engine={"device": "cuda"} | engine)
    machine = Machine(2, 24 * GIB, "", int(6.5 * GIB))
    tokens = [fitted(each, machine).trainer.max_tokens_per_microbatch for each in (given, same)]
    assert tokens[0] == tokens[1]


def test_a_sleeping_trainer_whose_state_is_on_the_disk_makes_room_for_engines(config: RunConfig) -> None:
    state = {"max_tokens_per_microbatch": 256, "async_checkpoints": False}
    waits = changed(config, placement={"kind": "colocated"}, trainer=state)
    offload = dict.fromkeys(("weights", "gradients", "optimizer"), "disk")
    places = [waits, changed(waits, trainer=state | {"offload": offload})]
    in_memory, on_disk = (
        fit(changed(each, engine={"replicas": 20}), SMALL, prompt_tokens=50, overlaps=False).table
        for each in places
    )
    least = [float(table.split("host memory, at most: ")[1].split()[0]) for table in (in_memory, on_disk)]
    assert least[0] - least[1] == pytest.approx(2.0, abs=0.11)


def test_the_parts_that_sleep_leave_the_device_to_the_other_side(config: RunConfig) -> None:
    placement = {"kind": "colocated", "devices": "gpus", "engines": [[0]], "trainer": [[0]]}
    gpu = changed(config, trainer={"device": "cuda"}, engine={"device": "cuda"}, placement=placement)
    kept = changed(gpu, trainer={"device": "cuda", "offload": {"optimizer": "device"}})
    held = [
        [
            {each.name: each.on_device for each in present}
            for where, _, present in held_at_once(each, list(run_memory(each, 50)), GPU)
            if where == "the memory of cuda"
        ]
        for each in (gpu, kept)
    ]
    context = {"CUDA": CUDA_BYTES}
    for (generating, training), stays in zip(held, ({}, {"optimizer": 8 * 134_515_008}), strict=True):
        assert generating["trainer"] == context | stays
        assert training["engine"] == context
        assert {"weights", "gradients", "optimizer", "micro-batch"} < training["trainer"].keys()
        assert {"weights", "one sequence"} < generating["engine"].keys()


@pytest.mark.parametrize("listed", [True, False])
def test_each_rank_with_a_gpu_of_its_own_has_all_of_it(config: RunConfig, listed: bool) -> None:
    ranks = {"device": "cuda", "ranks": 2, "activation_checkpointing": True}
    several = changed(config, trainer=ranks, engine={"device": "cuda"})
    own = changed(several, placement={"devices": "gpus", "trainer": [[1, 2]]})
    given = own if listed else several
    nums = [
        sum(each.num for each in present if each.name == "trainer")
        for where, _, present in held_at_once(given, list(run_memory(given, 50)), GPU)
        if where != "host memory" and any(each.name == "trainer" for each in present)
    ]
    assert nums == ([1, 1] if listed else [2])


def test_a_dry_run_prints_one_table_of_comments_in_80_columns(
    config_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "read", lambda uses_gpu: SMALL)
    text = config_path.read_text()
    for line in ('dtype = "float32"', "threads = 1"):  # as a user's, who sets neither
        text = text.replace(f"{line}\n", "")
    config_path.write_text(text)
    words = ["--engine.replicas", "2", "--trainer.dtype", "float32", "--dry-run", "--all"]
    assert main(["train", str(config_path), "--output-dir", str(config_path.parent / "out"), *words]) == 0
    out = capsys.readouterr().out
    resolved = tomllib.loads(out)
    assert resolved["engine"]["dtype"] == "bfloat16"
    assert resolved["trainer"]["max_tokens_per_microbatch"] == 1024
    table = [line for line in out.splitlines() if line.startswith("#")]
    assert max(map(len, table)) < 80
    rows = [line.split() for line in table]
    assert rows[0] == ["#", "process", "device", "threads", "dtype", "micro-batch", "memory"]
    assert rows[1][1:6] == ["trainer", "cpu", "1", "float32", "1,024"]
    assert rows[3][1:7] == ["engine", "x", "2", "cpu", "1", "bfloat16"]
    assert any(line.startswith("# host memory, at most: ") and line.endswith("of 24.0 GiB") for line in table)
    assert "# engine.dtype = bfloat16: the processor has avx512_bf16" in table
    assert not any(line.startswith("# trainer.dtype") for line in table), "it was set"
    why = "# engine.threads = 1: of 2 cores; the schedule trains while engines generate"
    assert why in " ".join(table)


def test_a_run_that_cannot_fit_starts_nothing(
    config_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "host_limit", lambda: 2**20)
    folder = config_path.parent / "out"
    for words in ([], ["--dry-run"]):
        assert main(["train", str(config_path), "--output-dir", str(folder), *words]) == 2
        assert "of host memory, and this machine has 1 MiB" in capsys.readouterr().err
    assert not folder.exists()


def test_the_cores_are_those_of_the_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_CPU_LIMIT", tmp_path / "cpu.max")
    free = Machine.read(uses_gpu=False)
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert Machine.read(uses_gpu=False).cores == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert Machine.read(uses_gpu=False) == free
    assert free.gpu_memory == 0


def named(config: Path, overrides: dict[str, str]) -> dict[str, int]:
    return {each.name: each.num for each in run_memory(load_config(config, overrides), 8)}


def test_the_processes_are_those_of_the_config(config_path: Path) -> None:
    assert named(config_path, {})["trainer"] == 1
    sharded = named(config_path, {"trainer.ranks": "2", "trainer.replicas": "2"})
    assert sharded["trainer"] == 4
    files = {"weights.transport": "filesystem", "trainer.replicas": "2"}
    assert "copies of the weights" not in named(config_path, files), "the trainer's estimate has them"
    assert named(config_path, files | {"trainer.device": "cuda"})["copies of the weights"] == 2
    with_reference = {"algorithm.kl_coef": "0.1"}
    assert "reference" in named(config_path, with_reference)
    assert "reference" not in named(config_path, with_reference | {"trainer.lora.rank": "4"})
    joined = {"host.listen": '"0.0.0.0:7777"', "host.join": '["trainer", "engine"]'}
    assert named(config_path, joined).keys().isdisjoint({"trainer", "engine"})
    assert "engine" not in named(config_path, {"engine": '{ kind = "vllm", urls = ["http://nowhere:1"] }'})


def test_the_longest_sample_follows_from_data_and_limits_and_an_episode_fills_the_context(
    config_path: Path,
) -> None:
    def longest(**given: str) -> int:
        overrides = {key.replace("__", "."): value for key, value in given.items()}
        return longest_sample(load_config(config_path, overrides), 32)

    assert longest(sampling__max_completion_tokens="8") == 40
    assert longest(sampling__max_completion_tokens="8", data__max_prompt_tokens="16") == 24
    model = load_config(config_path).model
    assert model
    environment = '{ kind = "python", environment = "a:b" }'
    assert longest(environment=environment) == context_length(model.path)


def test_the_limit_of_the_machine_is_that_of_the_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "memory.max").write_text("123456\n")
    (tmp_path / "unlimited").write_text("max\n")
    monkeypatch.setattr(machine, "_CGROUP_LIMITS", (tmp_path / "memory.max", tmp_path / "absent"))
    assert host_limit() == 123456
    monkeypatch.setattr(machine, "_CGROUP_LIMITS", (tmp_path / "unlimited",))
    assert host_limit() > 2**29
