"""The command: what it refuses and how, what it prints, and what it does not import."""

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from transformers import Qwen3Config

from agentfactory.commands.main import main
from agentfactory.commands.options import complete_override, completion_script, parse
from tests.chat_tokenizers import make_tokenizer, trl_template

pytestmark = pytest.mark.processes

# overrides, or a change of the recipe (`old => new`), and the message: field, value and fix
BROKEN = [
    ("1e-5 => 1e-5, lr: 3", r"recipe\.yaml: train\.lr: .*'lr'"),
    ("learning_rate=1e-3", r"command line: learning_rate: .*train\.learning_rate"),
    ("model.lora=8", r"model\.lora: .*8.*indented"),
    ("model.dtype=fp8", r"model\.dtype: .*'fp8'.*'bfloat16'"),
    ("path: model,  => ", r"recipe\.yaml: model\.path: missing.*Hub name or folder"),
    ("data.path=none.jsonl", r"data\.path: .*none\.jsonl.*no such file"),
    ("path: model => path: ./none", r"recipe\.yaml: model\.path: .*none.*hub name"),
    (
        "data.columns={problem: question}",
        r"recipe\.yaml: data\.path: row 1 of .*neither 'question' nor 'messages'.*rename",
    ),
    ("eval.data.columns={problem: question}", r"recipe\.yaml: eval\.data\.path: row 1 of .*heldout\.jsonl"),
    ("data.columns={question: text}", r"data\.columns\.question: .*no field 'text'.*fix: name one of those"),
    ("eval.data.columns={solution: answer}", r"rewards\.0: exact needs 'answer'.*in row 1 of eval\.data"),
    (
        "tools=[my_tools.py:World] rewards=[] eval.data.columns={solution: answer}",
        r"tools\.0: .*World needs answer, which row 1 of eval\.data lacks \(question, solution\)",
    ),
    (
        "mcp_servers.w.module=my_tools.py:World rewards=[] data.columns={solution: answer}",
        r"mcp_servers\.w\.module: .*World needs answer, which row 1 of data lacks",
    ),
    ("model.chat_template=t.jinja", r"model\.chat_template: .*t\.jinja.*Jinja"),
    ("train.from_trajectories=old", r"train\.from_trajectories: .*old.*JSONL"),
    ("\nmodel => \nextends: base.yaml\nmodel", r"extends: .*base\.yaml"),
    ("tools=[my_tools.py:serch]", r"tools\.0: .*serch.*search, exact, World"),
    ("tools=[none.py:search]", r"tools\.0: .*none\.py.*FILE\.py:NAME"),
    ("tools=[my_tools.py:plain]", r"tools\.0: .*my_tools\.py:plain.*@tool"),
    ("rewards=[my_tools.py:plain]", r"rewards\.0: .*my_tools\.py:plain.*@reward"),
    ("data=null", r"data: missing.*data\.path"),
    (
        "tools=[] rollout.agent={command: [no-agent, '${task.question}']}",
        r"command line: rollout\.agent\.command\.0: .*no program 'no-agent'.*fix: install it",
    ),
    ("mcp_servers.a.url=localhost:8000", r"mcp_servers\.a\.url: .*'localhost:8000'.*http://127"),
    ("", r"model\.path: .*model has no config\.json; fix: name a folder"),
    ("tools=[] rollout.agent={command: sh run.sh}", r"rollout\.agent\.command: .*not a list.*fix: write \["),
    (
        "tools=[] rollout.agent={command: [sh, '${here}/nope.sh']}",
        r"rollout\.agent\.command\.1: .*nope\.sh: no such file; fix: name an existing script",
    ),
    (
        "tools=[] rollout.agent={command: [sh, '${task.qestion}']}",
        r"command\.1: .*'\$\{task\.qestion\}'.*row 1 of data has no qestion.*fix: write \$\{task\.question\}",
    ),
    (
        "tools=[] rollout.agent={command: [sh, --ask, '${question}']}",
        r"agent\.command\.2: .*\$\{question\} is not replaced.*fix: write \$\{task\.question\}",
    ),
    (
        "mcp_servers.a={command: python3, url: 'http://127.0.0.1:1'}",
        r"mcp_servers\.a: got \['command', 'url'\]; fix: give exactly one of",
    ),
    ("embedded => vllm", r"server\.engine: .*'vllm'.*server\.url"),
    ("server.max_model_len=4096", r"rollout\.max_total_tokens: .*8192.*server\.max_model_len=4096"),
    ("sync.backend=lora", r"sync\.backend: .*'lora'.*model\.lora\.rank"),
    ("model.lora.rank=8 sync.backend=file", r"sync\.backend: .*'file'.*use lora or auto"),
    ("model.lora.rank=8 rollout.inflight=keep", r"rollout\.inflight: .*adapter"),
    ("rollout.inflight=keep", r"rollout\.inflight: .*rollout\.max_staleness=0"),
    ("model.dtype=float16", r"model\.dtype: .*'float16'.*bfloat16"),
    ("train.processes=2", r"train\.strategy: .*'single'.*ddp"),
    ("train.keep_last=2 train.keep_best=eval/sampled/success", r"train\.keep_best: .*eval\.every"),
    ("train.keep_last=2 train.keep_best=sucess", r"train\.keep_best: .*no metric"),
    ("train.keep_best=reward", r"train\.keep_best: .*train\.keep_last"),
    ("rollout.group_size=1", r"rollout\.group_size: .*1.*at least 2"),
    ("eval.data=null eval.every=5", r"eval\.every: .*5.*eval\.data\.path"),
    ("server.host=0.0.0.0", r"server\.host: .*'0\.0\.0\.0'.*127\.0\.0\.1"),
    ("server.url=localhost:8000", r"server\.url: .*'localhost:8000'.*http://"),
    ("server.url=[http://a:1,http://a:1]", r"server\.url: .*each server once"),
    ("seed", r"'seed'.*key=value"),
    ("rollout.on_outcome={reward_error: mask}", r"on_outcome\.reward_error: got mask.*use drop or retry"),
]


def everything_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


Output = pytest.CaptureFixture[str]


@pytest.mark.parametrize(("fault", "told"), BROKEN)
def test_broken_recipes_end_with_a_message_and_no_file(fault: str, told: str, project: Path, capsys: Output) -> None:
    old, changes, new = fault.partition(" => ")
    if changes:
        text = (project / "recipe.yaml").read_text()
        assert old in text
        (project / "recipe.yaml").write_text(text.replace(old, new))
    before = everything_in(project)
    overrides = [] if changes else re.split(r" (?=[a-z_.]+=)", fault) if fault else []
    assert main(["train", "recipe.yaml", *overrides]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), "fix: " in err or "; use " in err) == ("", 1, True)
    assert re.search(told, err), err
    assert everything_in(project) == before


def test_a_folder_for_a_recipe_is_told_what_is_in_it(project: Path, capsys: Output) -> None:
    (project / "runs" / "mine").mkdir(parents=True)
    assert main(["eval", "runs/mine"]) == 2
    assert "recipe: runs/mine: is a folder; fix: name a YAML file" in capsys.readouterr().err
    (project / "runs" / "mine" / "recipe.yaml").touch()
    assert main(["eval", "runs/mine"]) == 2
    assert capsys.readouterr().err == "agentfactory: recipe: runs/mine: is a folder; fix: name runs/mine/recipe.yaml\n"


def test_dry_run_prints_the_resolved_recipe_and_writes_nothing(project: Path, capsys: Output) -> None:
    before = everything_in(project)
    assert main(["train", "recipe.yaml", "--dry-run", "train.steps=3", "output=elsewhere"]) == 0
    recipe = yaml.safe_load(capsys.readouterr().out)
    assert recipe["train"]["steps"] == 3
    assert recipe["output"] == str(project / "elsewhere")
    # serving needs neither tasks nor rewards, and where a server is named none is started, and vLLM is not missed
    assert main(["serve", "recipe.yaml", "data=null", "rewards=[]", "--dry-run"]) == 0
    assert main(["eval", "recipe.yaml", "server.engine=vllm", "--url", "http://127.0.0.1:1", "--dry-run"]) == 0
    assert everything_in(project) == before


SOURCES = """
def good(): return [{"question": "1 + 1?", "answer": "2"}]
def faulty(): yield {"question": {}["lost"]}
def elsewhere(): raise ConnectionError("no network")
def other(): return [{"prompt": "1 + 1?"}]
def poor(): return [{"question": "1 + 1?"}]
"""


def test_a_dry_run_probes_the_chat_template(project: Path, capsys: Output) -> None:
    def dry(*overrides: str) -> tuple[int, str, str]:
        status = main(["train", "recipe.yaml", "--dry-run", *overrides])
        return status, *capsys.readouterr()

    make_tokenizer(trl_template("qwen2_5")).save_pretrained(project / "model")
    status, out, _ = dry()
    assert (status, "# tool calls in recipe: hermes; rows: append\n" in out) == (0, True)
    status, _, err = dry("rollout.parser=mistral")
    assert (status, "rollout.parser: got 'mistral', and the chat template writes tool calls" in err) == (2, True)
    Qwen3Config(vocab_size=100).save_pretrained(project / "model")
    status, _, err = dry()
    assert status == 2
    assert re.search(r"model\.path: the chat template needs .*, and the network has 100 tokens; fix: ", err)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("faulty", "data.source: sources.py:faulty failed: KeyError: 'lost' (sources.py, line 3); fix: correct it"),
        ("other", "data.source: row 1 of "),
        ("poor", "rewards.0: exact needs 'answer', which is neither one of "),
        ("good", ""),
        # another machine may have it
        ("elsewhere", "# not checked here: data.source: sources.py:elsewhere failed: ConnectionError: no network"),
    ],
)
def test_a_dry_run_calls_the_functions_that_give_tasks(name: str, told: str, project: Path, capsys: Output) -> None:
    (project / "sources.py").write_text(SOURCES)
    status = main(["train", "recipe.yaml", "--dry-run", "data.path=null", f"data.source=sources.py:{name}"])
    out, err = capsys.readouterr()
    if name in ("good", "elsewhere"):
        assert (status, told in out) == (0, True)
    else:
        assert (status, err.splitlines()[-1].startswith(f"agentfactory: {told}")) == (2, True)


def test_refusals_of_other_modules_are_told_in_one_line(project: Path, capsys: Output) -> None:
    (project / "empty").mkdir()
    for command in ("view empty", "chat nowhere", "eval recipe.yaml --beside runs", "export none --output x"):
        assert main(command.split()) == 2
        told = capsys.readouterr()
        assert (told.out, told.err.count("\n")) == ("", 1)
        assert told.err.startswith("agentfactory: ")


def imports(code: str, cwd: Path) -> set[str]:
    code += "\nimport sys; print('\\n'.join(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=True)
    return set(result.stdout.split())


HEAVY = {"torch", "transformers", "datasets", "accelerate", "mcp", "matplotlib", "aiohttp"}


def test_public_names_and_recipes_load_without_heavy_packages(project: Path) -> None:
    names = "Environment, Group, Outcome, Trajectory, reward, tool"
    assert not HEAVY & imports(f"from agentfactory import {names}", project)
    check = "from agentfactory.commands.main import main; main(['train', 'recipe.yaml', '--dry-run'])"
    assert not HEAVY & imports(check, project)
    assert not HEAVY & imports("import agentfactory.launching.launcher, agentfactory.commands.server_commands", project)


@pytest.mark.parametrize(
    ("module", "spared"),
    [
        ("agentfactory.tools.serve", {"torch", "transformers", "numpy", "aiohttp"}),
        ("agentfactory.rollout.workers.rollout_worker", {"torch", "accelerate", "scipy", "datasets"}),
        pytest.param(
            "agentfactory.launching.trainer_main",
            {"peft", "bitsandbytes", "mcp", "datasets", "matplotlib"},
            marks=pytest.mark.extended,
        ),
    ],
)
def test_the_processes_of_a_run_load_only_what_they_need(tmp_path: Path, module: str, spared: set[str]) -> None:
    assert not spared & imports(f"import {module}", tmp_path)


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(ImportError, match="agentfactory"):
        from agentfactory import no_such_name  # noqa: F401


def test_help_shows_examples_that_can_be_parsed(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        return capsys.readouterr().out

    everything = shown("--help")
    assert "130  interrupted" in everything
    assert shown("--version").startswith("agentfactory ")
    for command in re.findall(r"^    ([a-z]+)\b", everything, re.MULTILINE):
        examples = shown(command, "--help").partition("examples:\n")[2].splitlines()
        assert examples
        for line in examples:
            # without what only a shell reads
            args = shlex.split(line.partition("#")[0].replace('eval "$(', "").replace(')"', "").replace("| source", ""))
            assert args[:2] == ["agentfactory", command]
            if args[1:3] != ["tools", "serve"]:
                assert parse(args[1:]).command == command


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("trian recipe.yaml", "agentfactory: error: there is no command 'trian'; did you mean train?"),
        ("train recipe.yaml --owerwrite", "agentfactory train: error: unrecognized arguments: --owerwrite"),
        ("doctor --sample 4", "agentfactory doctor: error: --coordinates and --sample need a recipe: name one\n"),
    ],
)
def test_a_slip_is_told_by_what_was_meant(typed: str, said: str, capsys: Output) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(typed.split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


COMPLETE = r"""
PATH=$1:$PATH
eval "$3"
COMP_LINE=$2 COMP_POINT=${#2} COMP_TYPE=9
_python_argcomplete agentfactory
printf '%s\n' "${COMPREPLY[@]}"
"""
"""What bash does at a Tab behind the line $2, having read the script $3."""


def completed(line: str) -> set[str]:
    command = ["bash", "-c", COMPLETE, "bash", str(Path(sys.executable).parent), line, completion_script("bash")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return {word.strip() for word in result.stdout.splitlines()}


def test_fields_and_values_complete_by_the_schema() -> None:
    assert {"train.schedule=", "rollout.agent.options.env=", "data.path="} < {*complete_override("")}
    assert complete_override("train.schedule=")[1:3] == ["train.schedule=linear", "train.schedule=cosine"]
    assert complete_override("train.liger=") == ["train.liger=true", "train.liger=false"]
    assert complete_override("train.keep_last=") == ["train.keep_last=null"]
    assert complete_override("rollout.inflight=") == ["rollout.inflight=recompute", "rollout.inflight=keep"]
    assert complete_override("data.columns=") == complete_override("nothing=") == []


@pytest.mark.extended
def test_shells_complete_commands_options_and_fields(project: Path) -> None:
    assert {"train", "tools"} <= completed("agentfactory t")
    assert completed("agentfactory tools ch") == {"check"}
    assert completed("agentfactory vi") == {"view"}
    assert completed("agentfactory view --ex") == {"--export"}
    assert completed("agentfactory eval recipe.yaml --ch") == {"--checkpoint"}
    assert completed("agentfactory train rec") == {"recipe.yaml"}
    assert "train.learning_rate=" in completed("agentfactory train recipe.yaml train.le")
    # bash takes what stands before = for a word of its own
    assert completed("agentfactory train recipe.yaml train.algorithm=dr") == {"dr_grpo"}
    assert completed("agentfactory train recipe.yaml train.liger=") == {"true", "false"}


@pytest.mark.extended
def test_a_tab_does_not_import_the_viewer(project: Path) -> None:
    code = "import argcomplete, os; argcomplete.autocomplete = lambda *_, **__: None; "
    code += "from agentfactory.commands.options import answer_completion; "
    assert "agentfactory.viewer.app" not in imports(f"{code}answer_completion()", project)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_one_that_the_shell_can_read(shell: str, capsys: Output) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert "agentfactory" in text
    if found := shutil.which(shell):
        subprocess.run([found, "-n"], input=text, text=True, check=True)


def test_a_defect_is_told_on_one_screen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from agentfactory.commands import new

    def dig(*_: object, depth: int = 40) -> None:
        if depth == 0:
            raise RuntimeError("the bottom")
        # in turns, for a function that only calls itself is shown once
        hand_on(depth - 1)

    def hand_on(depth: int) -> None:
        dig(depth=depth)

    monkeypatch.setattr(new, "write_task", dig)
    assert main(["new", "sums"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) < 24
    assert lines[-1] == "agentfactory: failed: RuntimeError: the bottom"
    whole = Path(lines[0].removeprefix("the whole traceback: "))
    # what is left out on the screen: where it began
    assert "/main.py" in whole.read_text()
    assert not any("/main.py" in line for line in lines)
    whole.unlink()


def test_temporary_files_that_go_elsewhere_are_told(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(folder: str | Path) -> tuple[int, str]:
        monkeypatch.setattr(tempfile, "tempdir", None)
        monkeypatch.setenv("TMPDIR", str(folder))
        return main(["new", "Bad name"]), capsys.readouterr().err

    (project / "own").mkdir()
    refused = told(project / "own")
    assert "temporary" not in refused[1]
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/no/folder", str(project / "own")])
    notice = f"agentfactory: TMPDIR=/no/folder is not a folder: temporary files go to {project / 'own'}"
    assert told("/no/folder") == (refused[0], f"{notice}\n{refused[1]}")
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/no/folder"])
    assert told("/no/folder") == (
        2,
        "agentfactory: TMPDIR: No usable temporary directory found in ['/no/folder']; "
        "fix: set it to a folder with space that you can write\n",
    )


def test_a_small_limit_of_address_space_is_told() -> None:
    command = f"ulimit -v 3145728; {sys.executable} -m agentfactory completion bash"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    notice = "agentfactory: each process may map 3.0 GiB (ulimit -v), and the libraries alone map 1.2 GiB"
    assert done.stderr.startswith(notice)


def test_a_reader_that_leaves_is_no_defect(project: Path) -> None:
    command = f"{sys.executable} -m agentfactory train recipe.yaml --dry-run"
    pipe = subprocess.run(f"{command} | true", shell=True, capture_output=True, text=True)
    assert pipe.stderr == ""
