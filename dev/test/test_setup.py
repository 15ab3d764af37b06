"""scripts/setup.sh and other scripts for the shell on made-up systems, whose programs are a few lines each, and the
Dockerfiles."""

import os
import re
import shlex
import shutil
import signal
import subprocess

import pytest
from optional import python  # noqa: F401
from trainer import ROOT

BASE = ("gcc", "libc6-dev", "libdnnl-dev", "libcjson-dev", "libcmocka-dev", "libopenmpi-dev", "openmpi-bin")
TOOLS = ("bash", "dirname", "cat", "chmod", "cmp", "cp", "mkdir", "env")  # of the machine that the tests run on
# Of a made-up interpreter: is it 3.11, and has it venv? Its venv has a pip that does nothing.
PYTHON = """#!/bin/sh
case "$1 $2" in
"-c "*) exit {too_old} ;;
"-m venv") mkdir -p .venv/bin; echo "#!/bin/sh" > .venv/bin/pip; chmod +x .venv/bin/pip; echo {name} > .venv/made-by ;;
esac
"""
# Installing a package python... makes its interpreter.
APT_GET = """#!/bin/sh
echo "$@" >> {log}
for word; do
  case $word in
  python3.11) cp {bin}/new-python {bin}/python3.11 ;;
  python3-venv) cp {bin}/new-python {bin}/python3 ;;
  esac
done
"""


class System:
    def __init__(self, directory, release, python_is_old=False, programs=("apt-get",), kernel="Linux"):
        self.tree, self.bin, self.log = directory / "tree", directory / "bin", directory / "apt.log"
        self.release = directory / "os-release"
        self.release.write_text(release)
        for folder in ("scripts", "data"):
            (self.tree / folder).mkdir(parents=True)
        shutil.copy(ROOT / "scripts/setup.sh", self.tree / "scripts")
        (self.tree / "data/requirements.txt").write_text("numpy\n")
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.add("id", "#!/bin/sh\necho 0\n")
        self.add("uname", f"#!/bin/sh\necho {kernel}\n")
        self.add("new-python", PYTHON.format(too_old=0, name="new"))
        if python_is_old:
            self.add("python3", PYTHON.format(too_old=1, name="old"))
        if "apt-get" in programs:
            self.add("apt-get", APT_GET.format(log=self.log, bin=self.bin))

    def add(self, name, text):
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def set_up(self, **environment):
        environment = {"PATH": str(self.bin), "OS_RELEASE": str(self.release), "CUDA": "0", **environment}
        return subprocess.run([self.bin / "bash", self.tree / "scripts/setup.sh"], env=environment, capture_output=True, text=True)

    def installed(self):
        return set(re.search(r"^install (.*)$", self.log.read_text(), re.M)[1].split()) - {"-y", "-qq", "--no-install-recommends"}


@pytest.mark.parametrize("release, old, packages", [
    ("ID=debian\nVERSION_ID=12\n", False, {"python3-venv"}),
    ("ID=debian\nVERSION_ID=13\n", False, {"python3-venv"}),
    ('NAME="Ubuntu"\nID=ubuntu\nVERSION_ID="24.04"\n', False, {"python3-venv"}),
    ('NAME="Ubuntu"\nID=ubuntu\nVERSION_ID="22.04"\n', True, {"python3.11", "python3.11-venv"})])
def test_what_is_missing_is_installed_by_its_name(tmp_path, release, old, packages):
    system = System(tmp_path, release, old)
    done = system.set_up()
    assert done.returncode == 0 and done.stderr == "" and "isn't known" not in done.stdout, done
    assert system.installed() == {*BASE, *packages}
    assert (system.tree / ".venv/made-by").read_text() == "new\n"
    assert (system.tree / ".venv/installed").read_text() == "numpy\n"


NOT_FOUND = """#!/bin/sh
echo "cuDNN   older than 9.10.2: attention on GPUs by kernels of ours, slower (install it: .venv/bin/pip install nvidia-cudnn-cu12)"
echo "NCCL    not found: no training on several GPUs (.venv/bin/pip install nvidia-nccl-cu12)"
"""


@pytest.mark.parametrize("gpu, cuda, found, installed", [
    (True, "1", NOT_FOUND, ["nvidia-cudnn-cu12 nvidia-nccl-cu12"]),
    (True, "1", "#!/bin/sh\necho 'cuDNN   found: attention on GPUs'\n", []),
    (True, "0", NOT_FOUND, []),
    (False, "1", NOT_FOUND, [])])
def test_a_gpu_gets_cudnn_and_nccl(tmp_path, gpu, cuda, found, installed):
    system = System(tmp_path, "ID=debian\nVERSION_ID=12\n")
    (system.bin / "grep").symlink_to(shutil.which("grep"))
    pip = f"#!/bin/sh\necho \"$@\" >> {tmp_path}/pip.log\n"
    system.add("new-python", PYTHON.format(too_old=0, name="new").replace('echo "#!/bin/sh" >', f"cp {tmp_path}/pip"))
    (tmp_path / "pip").write_text(pip)
    system.add("nvcc", "#!/bin/sh\n")
    system.add("make", found)
    system.add("nvidia-smi", TWO_GPUS if gpu else NO_DRIVER)
    done = system.set_up(CUDA=cuda)
    assert done.returncode == 0 and done.stderr == "", done
    wheels = [line.split("version-check ")[1] for line in (tmp_path / "pip.log").read_text().splitlines()]
    assert wheels == ["-r data/requirements.txt", *installed]


def test_a_system_that_isn_t_known_but_has_apt_get(tmp_path):
    done = System(tmp_path, "ID=pop\nVERSION_ID=22.04\n").set_up()
    assert done.returncode == 0 and "this system (pop 22.04) isn't known here" in done.stdout


def test_a_python_that_is_too_old(tmp_path):
    system = System(tmp_path, "ID=debian\nVERSION_ID=11\n", True)
    system.add("new-python", PYTHON.format(too_old=1, name="still old"))
    done = system.set_up()
    assert done.returncode == 2 and "Python 3.11 or later is needed" in done.stderr
    assert not (system.tree / ".venv").exists()


def test_fedora_is_told_what_to_install(tmp_path):
    system = System(tmp_path, "ID=fedora\nVERSION_ID=42\n")
    done = system.set_up()
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    names = "gcc glibc-devel onednn-devel cjson-devel libcmocka-devel openmpi-devel openmpi python3;"
    assert f"sudo dnf install {names}" in done.stderr and "/usr/lib64/openmpi/bin" in done.stderr
    assert not system.log.exists()


def test_macos_is_told_of_a_container(tmp_path):
    system = System(tmp_path, "", kernel="Darwin")
    system.release.unlink()
    done = system.set_up()
    assert done.returncode == 2 and "macOS isn't supported" in done.stderr and "Dockerfile.cpu" in done.stderr
    assert (ROOT / "Dockerfile.cpu").is_file() and not system.log.exists()


def test_a_system_without_apt_get(tmp_path):
    done = System(tmp_path, "ID=arch\n", programs=()).set_up()
    assert done.returncode == 2 and "has no apt-get; install what matches Debian's packages gcc" in done.stderr


# scripts/multi_node/environment.sh ----------------------------------------------------------------

TWO_GPUS = "#!/bin/sh\necho 'GPU 0: a (UUID: GPU-1)'\necho 'GPU 1: a (UUID: GPU-2)'\n"
NO_DRIVER = "#!/bin/sh\necho \"NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\"\nexit 9\n"


def start_ranks(directory, nvidia_smi=None, **environment):
    """Calls the script, from a directory beside it, in a tree whose program says which rank it is, and where."""
    (directory / "tree/scripts/multi_node").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/multi_node/environment.sh", directory / "tree/scripts/multi_node")
    (directory / "bin").mkdir()
    for tool in ("bash", "dirname", "grep", "sh", "wc"):
        (directory / "bin" / tool).symlink_to(shutil.which(tool))
    says = "#!/bin/sh\necho rank $RANK of $WORLD_SIZE in $(pwd), $*\n"
    programs = {"tree/train_gpt_mxfp8": says, "bin/nvidia-smi": nvidia_smi}
    for name, text in programs.items():
        if text:
            (directory / name).write_text(text)
            (directory / name).chmod(0o755)
    (directory / "caller").mkdir()
    command = [directory / "bin/bash", "../tree/scripts/multi_node/environment.sh", "--max-steps", "3"]
    return subprocess.run(command, cwd=directory / "caller", env={"PATH": str(directory / "bin"), **environment},
                          capture_output=True, text=True)


@pytest.mark.parametrize("nvidia_smi", [None, NO_DRIVER], ids=["no-nvidia-smi", "no-driver"])
def test_no_gpu_is_a_sentence(tmp_path, nvidia_smi):
    done = start_ranks(tmp_path, nvidia_smi)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done
    assert done.stderr.startswith("environment.sh: no GPU was found; set RANKS.")


@pytest.mark.parametrize("nvidia_smi, environment, ranks", [(TWO_GPUS, {}, 2), (TWO_GPUS, {"RANKS": "1"}, 1), (None, {"RANKS": "3"}, 3)])
def test_a_rank_for_each_gpu(tmp_path, nvidia_smi, environment, ranks):
    done = start_ranks(tmp_path, nvidia_smi, **environment)
    assert done.returncode == 0 and done.stderr == "", done
    assert sorted(done.stdout.splitlines()) == [
        f"rank {rank} of {ranks} in {tmp_path}/caller, --max-steps 3" for rank in range(ranks)]


def test_ctrl_c_reaches_a_rank_once(tmp_path):
    """As from a terminal, to all processes, also before the program catches signals: bash has it ignored by what runs in the
    background."""
    for name, traps in {"early": "", "late": "trap 'echo INT' INT; trap 'echo TERM' TERM; "}.items():
        (tmp_path / name / "scripts/multi_node").mkdir(parents=True)
        shutil.copy(ROOT / "scripts/multi_node/environment.sh", tmp_path / name / "scripts/multi_node")
        program = tmp_path / name / "train_gpt_mxfp8"
        program.write_text(f"#!/bin/bash\n{traps}echo begun; for i in {{1..50}}; do sleep 0.1; done; echo ended\n")
        program.chmod(0o755)
        script = subprocess.Popen(["bash", tmp_path / name / "scripts/multi_node/environment.sh"], env=os.environ | {"RANKS": "1"},
                                  stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert script.stdout.readline() == "begun\n"
        os.killpg(script.pid, signal.SIGINT)
        said, code = script.communicate(timeout=30)[0], script.returncode
        assert (said, code) == (("", 130) if name == "early" else ("INT\nended\n", 0))


def words_to(launcher, script, directory, programs=(), **environment):
    """Calls a script of several machines where `launcher` says what it is told, and in which directory."""
    (directory / "scripts/multi_node").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/multi_node" / script, directory / "scripts/multi_node")
    (directory / "bin").mkdir()
    for name, text in {launcher: "#!/bin/sh\npwd\nprintf '%s\\n' \"$@\"\n", **dict(programs)}.items():
        (directory / "bin" / name).write_text(text)
        (directory / "bin" / name).chmod(0o755)
    done = subprocess.run(["bash", directory / "scripts/multi_node" / script, "--train-data", "a *.bin"], cwd="/", capture_output=True,
                          text=True, env={"PATH": f"{directory / 'bin'}:{os.environ['PATH']}", **environment})
    assert done.returncode == 0 and done.stderr == "", done
    return done.stdout.splitlines()


def test_mpirun_on_several_machines(tmp_path):
    caller, *words = words_to("mpirun", "mpirun.sh", tmp_path, HOSTS="a:2,b:2", CORES="3", NETWORK="ib0")
    assert caller == "/"
    assert words[:8] == ["--host", "a:2,b:2", "--map-by", "slot:pe=3", "--bind-to", "core", "-x", "OMP_NUM_THREADS=3"]
    assert words[8:16] == ["--mca", "btl_tcp_if_include", "ib0", "--mca", "oob_tcp_if_include", "ib0", "-x", "NCCL_SOCKET_IFNAME=ib0"]
    assert words[-3:] == [f"{tmp_path}/train_gpt_mxfp8", "--train-data", "a *.bin"]
    assert ("--allow-run-as-root" in words) == (os.getuid() == 0)
    environment = {name: value for name, value in os.environ.items() if name != "HOSTS"}
    done = subprocess.run(["bash", ROOT / "scripts/multi_node/mpirun.sh"], capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and done.stdout == "" and "HOSTS=node1:8,node2:8" in done.stderr


def test_slurm_on_several_machines(tmp_path):
    """The machines' names are Slurm's; the port follows from the job's number. It is submitted where the program lies."""
    job = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "123456", "SLURM_CPUS_PER_TASK": "8"}
    scontrol = '#!/bin/sh\n[ "$*" = "show hostnames n[1-2]" ] && printf "n1\\nn2\\n"\n'
    srun = "#!/bin/sh\nprintf '%s\\n' \"$PWD\" $MASTER_ADDR:$MASTER_PORT $OMP_NUM_THREADS \"$@\"\n"
    (tmp_path / "elsewhere").mkdir()
    done = subprocess.run(["bash", ROOT / "scripts/multi_node/slurm.sh"], capture_output=True, text=True,
                          env=os.environ | job | {"SLURM_SUBMIT_DIR": str(tmp_path / "elsewhere")})
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "submit this from the repository" in done.stderr
    (tmp_path / "train_gpt_mxfp8").write_text("#!/bin/sh\n")
    (tmp_path / "train_gpt_mxfp8").chmod(0o755)
    assert words_to("srun", "slurm.sh", tmp_path, {"scontrol": scontrol, "srun": srun}.items(), **job) == [
        str(tmp_path), "n1:23456", "8", "--kill-on-bad-exit=1", "--cpus-per-task=8", "./train_gpt_mxfp8", "--train-data", "a *.bin"]


# scripts/demo.sh ----------------------------------------------------------------------------------

# Leaves a run in its --out-dir, and says which options follow.
TRAINER = """#!/bin/sh
while [ "$1" != --out-dir ]; do shift; done
mkdir -p "$2"
touch "$2/log.jsonl"
echo step_000002 > "$2/latest"
shift 2
echo "rest: $*"
"""


@pytest.fixture
def demo(tmp_path):
    """Returns a function that calls the script in a tree of made-up programs, from a directory beside it."""
    tree = tmp_path / "a tree"
    for name, text in {"scripts/demo.sh": (ROOT / "scripts/demo.sh").read_text(), "train_gpt_mxfp8": TRAINER,
                       ".venv/bin/python": "#!/bin/sh\n"}.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
        (tree / name).chmod(0o755)

    def call(*arguments, cwd=tmp_path):
        return subprocess.run([tree / "scripts/demo.sh", *arguments], cwd=cwd, capture_output=True, text=True)

    return call


def test_the_demo_prints_commands_that_can_be_pasted(demo, tmp_path):
    done = demo("--max-steps", "2", "--out-dir", "my demo", "--seed", "3")
    assert done.returncode == 0 and done.stderr == "" and "rest: --max-steps 2 --seed 3\n" in done.stdout, done
    run = tmp_path / "my demo"  # of the caller's directory
    assert (run / "latest").is_file() and f"picture     {run}/loss.png\n" in done.stdout
    generate, bf16, plot = re.findall(r"^ *(\S*(?:train_gpt_mxfp8|demo.sh|python scripts/plot.py) .*)$", done.stdout, re.M)[:3]
    assert shlex.split(generate)[1:3] == ["--generate", f"{run}/step_000002"]
    assert shlex.split(bf16)[1:] == ["--recipe", "bf16", "--out-dir", f"{run}-bf16"]
    assert shlex.split(plot)[1:] == ["scripts/plot.py", f"{run}", f"{run}-bf16", "--out", "both.png"]


def test_where_the_demo_s_run_lies(demo, tmp_path):
    tree = tmp_path / "a tree"
    done = demo()
    assert done.returncode == 0 and re.search(r"^log         runs/demo-[\d-]+/log.jsonl", done.stdout, re.M), done
    assert len(list((tree / "runs").glob("demo-*/latest"))) == 1
    for words, cwd, path in ((["--out-dir=runs/x"], tree, "runs/x"), (["--out-dir", f"{tmp_path}/y"], tree, f"{tmp_path}/y")):
        done = demo(*words, cwd=cwd)
        assert done.returncode == 0 and f"\nlog         {path}/log.jsonl," in done.stdout and (tree / path / "latest").is_file(), done
    done = demo("--seed", "3", "--out-dir")
    assert done.returncode == 2 and done.stderr == "demo.sh: --out-dir needs a directory\n"


# Dockerfiles --------------------------------------------------------------------------------------

DOCKERFILES = [ROOT / "Dockerfile", ROOT / "Dockerfile.cpu"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_hadolint_finds_nothing(python, path):
    done = subprocess.run([python.parent / "hadolint", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_dockerfiles_differ_by_their_image_alone():
    instructions = [[line for line in path.read_text().splitlines() if not line.startswith("#")] for path in DOCKERFILES]
    others = [[line for line in lines if not line.startswith("FROM ")] for lines in instructions]
    assert others[0] == others[1] and os.access(ROOT / "scripts/setup.sh", os.X_OK)
    images = [line for lines in instructions for line in lines if line.startswith("FROM ")]
    assert re.fullmatch(r"FROM nvidia/cuda:13\.\d\.\d-cudnn-devel-ubuntu24\.04", images[0]) and images[1] == "FROM debian:12"
