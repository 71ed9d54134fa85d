"""The doctor reads logs of failed runs: messages as people report them, healthy logs, secrets, and anything at "
"all."""

# ruff: noqa: E501 -- messages stand here as they were written

from __future__ import annotations

import io
import json
import random
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from potluck.checked import to_json
from potluck.cli._app import run
from potluck.cli._doctor_view import lines_of
from potluck.doctor import examine, log_file
from potluck.doctor.log import read_log
from potluck.doctor.log_file import read_parts
from potluck.doctor.log_text import MOST_QUOTED, Part, decoded, redacted
from potluck.doctor.signatures import SIGNATURES
from potluck.errors import UserError
from potluck.spec.facts import Case, Disk
from potluck.spec.finding import LogReading
from support.healthy import linux

DOCS = Path(__file__).resolve().parents[2] / "docs"


def read(text: str, name: str = "run.log") -> LogReading:
    return read_log([Part(1, text)], name)


def codes(text: str) -> list[str]:
    return [finding.code for finding in read(text).findings]


C10D = "[E socket.cpp:860] [c10d] The client socket has timed out after 60s while trying to connect to"
WATCHDOG = (
    "[E ProcessGroupNCCL.cpp:458] [Rank {}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={}, "
    "OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 25624887 milliseconds before timing out."
)
OMP = (
    "*****************************************\nSetting OMP_NUM_THREADS environment variable for each process to "
    "be "
    "1 in default, to avoid your system being overloaded, please further tune the variable for optimal performance "
    "in your application as needed. \n*****************************************\n"
)

# (pain, code, the message as in the reports that troubleshooting/doctor.md names)
MESSAGES: list[tuple[int, str, str]] = [
    (
        1,
        "gloo-mac-and-linux",
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:210] address family mismatch",
    ),
    (2, "mps-has-no-backend", "RuntimeError: No backend type associated with device type mps"),
    (
        2,
        "mps-has-no-backend",
        "[rank1]: RuntimeError: ProcessGroupGloo::allgather: invalid tensor type at index 0 (expected "
        "TensorOptions(dtype=long long, device=cpu, layout=Strided), got TensorOptions(dtype=long long, "
        "device=mps:0,",
    ),
    (
        2,
        "mps-has-no-backend",
        "ValueError: We detected accelerator mps on your machine. But we don't know which communication backend to "
        "use for this accelerator.",
    ),
    (3, "nccl-no-interface", "g5305cc:412:412 [0] bootstrap.cc:78 NCCL WARN Bootstrap : no socket interface found"),
    (
        3,
        "nccl-unreached",
        "[misc/socket.cc:602] [gn1268:pid=39] NCCL WARN socketPollConnect poll() failed, ret 1, error Connection "
        "timed out, revents 8, connect to 10.0.0.2:39953",
    ),
    (
        3,
        "nccl-unreached",
        "a:41:42 [1] include/socket.h:361 NCCL WARN Call to connect timeout : Connection refused",
    ),
    (
        3,
        "nccl-unreached",
        "tj1-v100-13:941227:943077 [0] include/socket.h:390 NCCL WARN Connect to 10.38.10.112<21724> failed : "
        "Connection refused",
    ),
    (
        3,
        "nccl-rdma-no-answer",
        "a:98:13 [4] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.1.2.3<5592> with "
        "status=12 opcode=1 len=0 vendor err 129 (Send) localGid ::ffff:10.1.2.4",
    ),
    (
        3,
        "nccl-rdma-no-answer",
        "a:98:13 [1] transport/net_ib.cc:839 NCCL WARN NET/IB : Got completion from peer 10.1.2.3<38560> with "
        "error 12, opcode 0, len 0, vendor err 129",
    ),
    (
        3,
        "nccl-rdma-failed",
        "a:98:13 [0] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.1.2.3<40000> with "
        "error 4, opcode 0, len 0, vendor err 81 (Send)",
    ),
    (
        3,
        "nccl-rdma-failed",
        "a:46:85 [0] misc/ibvwrap.cc:187 NCCL WARN Call to ibv_modify_qp failed with error Network is unreachable",
    ),
    (
        3,
        "nccl-locked-memory",
        "a:1:2 [0] misc/ibvwrap.cc:278 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory",
    ),
    (
        19,
        "nccl-shared-memory",
        "a:20:22 [0] misc/shmutils.cc:132 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-WU8 "
        "(size 9637888), error: No space left on device (28)",
    ),
    (
        19,
        "nccl-shared-memory",
        "[3] include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No space left on device",
    ),
    (
        3,
        "loopback-taken",
        "[W ProcessGroupGloo.cpp:721] Warning: Unable to resolve hostname to a (local) address. Using the loopback "
        "address as fallback. Manually set the network interface to bind to with GLOO_SOCKET_IFNAME.",
    ),
    (
        5,
        "loopback-taken",
        "RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no "
        "error, "
        "Connection refused, remote=[127.0.0.1]:12345",
    ),
    (
        3,
        "gloo-unreached",
        "RuntimeError: Gloo connectFullMesh failed with [../gloo/transport/tcp/pair.cc:144] no error",
    ),
    (
        3,
        "nccl-unreached",
        "node:39964:40075 [0] misc/socket.cc:483 NCCL WARN socketStartConnect: Connect to 10.0.0.2<45763> failed : "
        "Software caused connection abort",
    ),
    (
        4,
        "gloo-variable-syntax",
        "RuntimeError: [enforce fail at ../gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address "
        "for: ^lo",
    ),
    (6, "rendezvous-unreached", f"{C10D} 192.0.0.1:1234"),
    (6, "rendezvous-unreached", f"{C10D} (192.0.0.1, 1234)."),
    (
        6,
        "rendezvous-unreached",
        "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has "
        "failed. See inner exception for details.",
    ),
    (6, "rendezvous-unreached", "RuntimeError: connect() timed out. Original timeout was 60000 ms."),
    (
        7,
        "local-network-privacy",
        "[c10d] The client socket has failed to connect to [mac.local]:29500 (errno: 65 - No route to host).",
    ),
    (7, "local-network-privacy", "OSError: [Errno 65] No route to host"),
    (
        8,
        "name-look-ups",
        "[W503 01:52:07.597517393 socket.cpp:204] [c10d] The hostname of the client socket cannot be retrieved. "
        "err=-3",
    ),
    (
        8,
        "name-look-ups",
        "[c10d] The IPv4 network addresses of (tower, 29500) cannot be retrieved (gai error: 8 - nodename nor "
        "servname provided, or not known).",
    ),
    (
        9,
        "port-in-use",
        "[W socket.cpp:401] [c10d] The server socket has failed to bind to 0.0.0.0:6021 (errno: 98 - Address "
        "already in use).",
    ),
    (
        10,
        "ipv6-half-there",
        "[W socket.cpp:464] [c10d] The server socket cannot be initialized on [::]:29500 (errno: 97 - Address "
        "family not supported by protocol).",
    ),
    (
        10,
        "ipv6-half-there",
        "[W socket.cpp:601] [c10d] The IPv6 network addresses of (localhost, 51595) cannot be retrieved (gai "
        "error: -2 - Name or service not known).",
    ),
    (11, "no-route", "OSError: [Errno 113] No route to host"),
    (
        14,
        "out-of-memory",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
        "11.76 GiB",
    ),
    (14, "out-of-memory", "n:28:52 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'"),
    (14, "out-of-memory", "n:28:52 [3] include/alloc.h:270 NCCL WARN Cuda failure 2 'out of memory'"),
    (15, "unequal-counts-refused", "ValueError: MPICH requires same number of devices per node"),
    (15, "unequal-counts-refused", "PyTorch requires you to use the same number of processes per node."),
    (
        15,
        "unequal-counts-refused",
        "RuntimeError: DeviceMesh only support homogeneous hardware, but found 5 ranks and 2 cuda devices!",
    ),
    (
        15,
        "not-everybody-came",
        "torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 6/8 clients joined.",
    ),
    (
        16,
        "waited-for-a-rank",
        "[rank2]: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out "
        "waiting 1800000ms for recv operation to complete",
    ),
    (
        16,
        "collectives-differ",
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running collective: "
        "CollectiveFingerPrint(SequenceNumber=21, OpType=BROADCAST",
    ),
    (17, "watchdog-timeout", WATCHDOG.format(0, 1580)),
    (
        17,
        "watchdog-timeout",
        "[rank0]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=466119168, NumelOut=466119168, "
        "Timeout(ms)=600000) ran for 600060 milliseconds before timing out.",
    ),
    (
        17,
        "other-rank-gone",
        "node0:1 [0] misc/socket.cc:538 NCCL WARN Net : Connection closed by remote peer node2<42830>",
    ),
    (18, "elastic-ended-all", "torch.distributed.elastic.rendezvous.api.RendezvousClosedError"),
    (
        18,
        "elastic-ended-all",
        "W0409 07:28:49.530000 1359 torch/distributed/elastic/agent/server/api.py:719] Received 15 death signal, "
        "shutting down workers",
    ),
    (
        18,
        "elastic-ended-all",
        "The node 'docker.b_3427_0' has failed to send a keep-alive heartbeat to the rendezvous 'test' due to an "
        "error of type RendezvousConnectionError.",
    ),
    (
        18,
        "rendezvous-lost",
        '  File "c10d_rendezvous_backend.py", line 116, in _call_store\n    raise RendezvousConnectionError(\n'
        "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has "
        "failed. "
        "See inner exception for details.",
    ),
    (
        19,
        "terminal-gone",
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 1234 got signal: 1",
    ),
    (
        20,
        "torn-file",
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
    ),
    (
        21,
        "ssh-did-not-enter",
        "subprocess.CalledProcessError: Command 'ssh -o PasswordAuthentication=no 192.168.3.100 hostname' returned "
        "non-zero exit status 255.",
    ),
    (21, "ssh-did-not-enter", "pdsh@tower: localhost: ssh exited with exit code 255"),
    (22, "versions-differ", "RuntimeError: Version mismatch: The cluster was started with:\n    Ray: 2.9.3"),
    (
        23,
        "windows-without-libuv",
        "RuntimeError: use_libuv was requested but PyTorch was build without libuv support",
    ),
    (23, "no-nccl-here", "RuntimeError: Distributed package doesn't have NCCL built in"),
    (
        24,
        "mps-out-of-memory",
        "RuntimeError: MPS backend out of memory (MPS allocated: 7.43 GB, other allocations: 24.46 GB, max "
        "allowed: 32.00 GB). Tried to allocate 129.21 MB on private pool.",
    ),
    (24, "mps-not-a-number", "using device: mps\nstep 3 | loss: nan | norm: nan"),
    (25, "one-thread-each", OMP),
]


@pytest.mark.parametrize(
    ("pain", "code", "text"), MESSAGES, ids=[f"{p}-{c}-{n}" for n, (p, c, _) in enumerate(MESSAGES)]
)
def test_a_message_that_people_report_is_named_and_nothing_else(pain: int, code: str, text: str) -> None:
    """In a log of other lines, with colours and Windows' ends of lines; and pasted alone."""
    (alone,) = read(text).findings
    assert (alone.code, pain in alone.pains) == (code, True)
    long = (
        "starting\nstep 1 loss 2.5\n" * 50
        + "Traceback (most recent call last):\r\n\x1b[31m"
        + text
        + "\x1b[0m\r\nbye\n"
    )
    (finding,) = read(long).findings
    assert finding.code == code
    number = int(re.match(r"line (\d+): ", finding.how)[1])  # type: ignore[index]
    assert number in range(102, 102 + text.count("\n") + 1)
    assert all((finding.what, finding.breaks, finding.fix, finding.potluck))
    assert not re.search(r"[{}]", finding.what + finding.fix.replace("$(", "").replace("{1", ""))


def test_every_pain_of_the_table_that_has_a_message_is_there() -> None:
    named = {pain for pain, _, _ in MESSAGES}
    assert named == set(range(1, 26)) - {12, 13}
    assert {code for _, code, _ in MESSAGES} == {signature.code for signature in SIGNATURES}


def test_the_page_names_every_code() -> None:
    page = (DOCS.parent / "src" / "potluck" / "troubleshooting" / "doctor.md").read_text(encoding="utf-8")
    others = {"worker-killed", "one-failed-all-ended", "ranks-out-of-step", "rank-raised", "rank-ended-early"}
    others |= {"script-not-there", "interrupted"}
    for code in {signature.code for signature in SIGNATURES} | others:
        assert f"`{code}`" in page, code


HOST = (
    "run 20261115-190847-gpt: gpt, 84.9 k parameters, 400 steps of 16 samples, vm on Intel Xeon, 1 thread\n"
    "guests may join at any time; codec int4\nstep 399/400  loss 2.1401  7.8 ms  1.5 k samples/s\n"
    "! ann (127.0.0.1) left: its script failed with KeyError: 'label'\n"
    "finished after step 400, 4.20 s, loss 2.1388, 1.5 k samples/s, 0.94× this machine alone\n"
    "run folder: runs/20261115-190847-gpt\n"
)
HEALTHY = {
    "torchrun": OMP + "rank 0 step 0 loss 2.0\nrank 1 step 0 loss 2.0\n",
    "torchrun of today": "".join(
        f"W1115 15:22:58.997000 9969 torch/distributed/run.py:852] {line}\n" for line in OMP.splitlines()
    )
    + "rank 0 step 0 loss 2.0\n",
    "NCCL's own words": "node0:1:1 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>\nnode0:1:1 [0] NCCL INFO "
    "Connected all rings\n",
    "INFO of c10d": "[I socket.cpp:442] [c10d - debug] The server socket will attempt to listen on an IPv6 "
    "address.\n"
    "INFO:torch.distributed.elastic.agent.server.api:[default] Rendezvous'ing worker group\n"
    "Rank 1: Completed store-based barrier for key:store_based_barrier_key:1 with 8 nodes.\n",
    "potluck host": HOST,
    "potluck join": "joined run 20261115-190847-gpt of vm (127.0.0.1) as ann, on Intel Xeon, 1 thread\n"
    "step 218: 2 samples at 170.94/s, loss 2.8716\nthe run is over: finished; this machine computed 3 samples\n",
    "words that only sound so": "downloading: Connection reset by peer, trying again\nfinance dumps: loss 1.0 "
    "nanometers\n"
    "out of memory: no\nport: 8080 is open\nPermission denied for user bob\nexit status 0\n"
    "exit code: 0\nlog level: ERROR\nNCCL_ASYNC_ERROR_HANDLING=1\n",
    "names and IPv6 that torch does without": "[W1115 16:33:51.260649702 socket.cpp:207] [c10d] The hostname of "
    "the client socket cannot be "
    "retrieved. err=-3\n[W socket.cpp:464] [c10d] The server socket cannot be initialized on [::]:29500 (errno: 97 "
    "- Address family not "
    "supported by protocol).\nstep 1 loss 2.0\n",
    "a bar": "\r".join(f"{n}%|####| loss=1.0" for n in range(100)) + "\n",
}


@pytest.mark.parametrize("name", HEALTHY)
def test_no_false_alarm(name: str) -> None:
    reading = read(HEALTHY[name])
    assert (reading.findings, reading.first_error, reading.failed) == ((), "", False)


def test_the_cause_comes_before_what_follows_from_it() -> None:
    text = "\n".join(
        [
            OMP,
            "RuntimeError: [/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:50911.",
            "E1115 15:22:59.013 9969 api.py:1002] failed (exitcode: -9) local_rank: 1 (pid: 10028) of binary: "
            "python",
        ]
    )
    assert codes(text) == ["worker-killed", "other-rank-gone", "one-thread-each"]
    crash = text.replace("-9", "1")
    assert codes(crash) == ["other-rank-gone", "one-failed-all-ended", "one-thread-each"]
    assert "rank 1 failed first, with exit code 1" in read(crash).findings[1].what


GONE = "RuntimeError: [/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:50911."


def trace(mark: str, last: str) -> str:
    return f'{mark}Traceback (most recent call last):\n{mark}  File "/a/train.py", line 7, in <module>\n{mark}    f()\n{mark}{last}\n'


def summary(*ranks: tuple[int, int]) -> str:
    """As torchrun writes it: rank and exit code, the root cause last."""
    entries = [
        f"[0]:\n  host      : x\n  rank      : {r} (local_rank: 0)\n  exitcode  : {c} (pid: 1)\n" for r, c in ranks
    ]
    return "".join(entries[:-1]) + "Root Cause (first observed failure):\n" + entries[-1]


@pytest.mark.parametrize(
    "last", ["KeyError: 'label'", "AssertionError", "json.decoder.JSONDecodeError: Extra data"]
)
def test_what_a_rank_raised_comes_before_what_the_others_suffered(last: str) -> None:
    for first, then in (("[rank1]: ", "[rank0]: "), ("[default1]:[rank1]: ", "[default0]:[rank0]: ")):
        # Whoever is quicker writes first, and torchrun may see the other one end first.
        for text in (trace(first, last) + trace(then, GONE), trace(then, GONE) + trace(first, last)):
            for root in (1, 0):
                found = read(OMP + text + summary((1 - root, -15), (root, 1))).findings
                assert found[0].code == "rank-raised"
                assert re.fullmatch(re.escape(f"rank 1: {last} (line ") + r"\d+\)", found[0].what)
                assert "train.py, line 7" in found[0].how
                assert found[1].code == "other-rank-gone"


def test_what_was_caught_and_what_is_a_consequence_is_no_cause() -> None:
    assert codes(trace("[rank0]: ", GONE)) == ["other-rank-gone"]
    caught = trace("", "TimeoutError: trying again")
    assert codes(caught + trace("[rank1]: ", "ValueError: x") + trace("[rank0]: ", GONE))[0] == "rank-raised"
    assert "ValueError" in read(caught + trace("[rank1]: ", "ValueError: x") + summary((1, 1))).findings[0].what
    assert codes(caught + trace("[rank0]: ", GONE) + summary((0, -15), (1, -9)))[0] == "worker-killed"
    chained = trace("", "KeyError: 1") + "\nDuring handling of the above exception, another exception occurred:\n\n"
    chained += trace("", "ValueError: the last") + summary((0, 1))
    assert "ValueError: the last" in read(chained).findings[0].what


def test_a_rank_that_ended_early_is_told_from_one_that_failed() -> None:
    lost = trace("[rank0]: ", GONE)
    assert codes(lost + summary((0, 1)))[0] == "rank-ended-early"
    assert codes(lost + trace("[rank2]: ", GONE) + summary((2, 1), (0, 1)))[0] == "rank-ended-early"
    for text in (
        lost,
        lost + summary((0, 1), (1, 3)),
        lost + summary((1, 3), (0, 1)),
        lost + summary((1, -11), (0, 1)),
    ):
        assert "rank-ended-early" not in codes(text)


def test_an_aside_alone_is_no_known_trouble() -> None:
    reading = read(OMP + trace("", "ValueError: no such port"))
    assert [f.code for f in reading.findings] == ["one-thread-each"]
    assert not reading.explained
    assert reading.first_error.startswith("ValueError: no such port (line ")
    assert "OMP_NUM_THREADS=6 " in read_log([Part(1, OMP)], "x", cores=6).findings[0].fix


@pytest.mark.parametrize(
    "line",
    [
        "Killed",
        "Segmentation fault (core dumped)",
        "run.sh: line 3: 1234 Killed   python x",
        "error: no disk",
        "2026-01-02 03:04:05 ERROR no disk",
        "srun: task 0: Exited with exit code 3",
        "the job ended, exit status 137",
    ],
)
def test_the_last_word_of_a_program_is_the_first_error(line: str) -> None:
    assert read(f"step 1\n{line}\n").first_error == f"line 2: {line}"
    assert read("step 1 loss 2.0\nstep 2 loss 1.9\n").first_error == ""


DUPLICATE = "[1,2]<stdout>:gpu3:298:303 [0] init.cc:497 NCCL WARN Duplicate GPU detected : rank 2 and rank 0 both on CUDA device 1000"
IOMMU = 'g1:126:126 [0] build/src/init.cc:122 NCCL WARN Missing "iommu=pt" from kernel command line which can lead to system instablity or hang!'


@pytest.mark.parametrize(
    ("said_next", "first_error"),
    [
        ("[1,2]<stdout>:gpu3:298:303 [0] NCCL INFO init.cc:867 -> 5", f"line 2: {DUPLICATE}"),
        ("[1,2]<stdout>:gpu3:298:303 [0] NCCL INFO comm 0x7f rank 0 nranks 2 - Init COMPLETE", ""),
        ("[1,2]<stdout>:gpu3:298:300 [0] NCCL INFO init.cc:867 -> 5", ""),
    ],
    ids=["failed", "continued", "another thread failed"],
)
def test_a_warning_of_nccl_is_a_failure_if_a_function_then_fails(said_next: str, first_error: str) -> None:
    between = "[1,4]<stdout>:gpu3:299:304 [1] NCCL INFO Channel 00 : 0[0] -> 1[1] via P2P/IPC"
    reading = read(f"{IOMMU}\n{DUPLICATE}\n{between}\n{said_next}\n{IOMMU}\n")
    assert (reading.first_error, reading.failed) == (first_error, bool(first_error))


def test_the_cause_that_torch_quotes_from_nccl_is_the_first_error() -> None:
    error = (
        "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, "
        "invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.28.9\n[rank3]: ncclInvalidUsage: This "
        "usually reflects invalid usage of NCCL library.\n[rank3]: Last error:\n[rank3]: Duplicate GPU detected : "
        "rank 3 and rank 0 both on CUDA device ac000"
    )
    cause = "DistBackendError: Duplicate GPU detected : rank 3 and rank 0 both on CUDA device ac000"
    assert cause in read(trace("[rank3]: ", error)).first_error


def test_what_potluck_lived_through_did_not_end_its_run() -> None:
    """Only its own last word tells that; what comes after it may have failed, such as the script's evaluation."""
    caught = trace("", "ValueError: a sample that cannot be read")
    assert read(HOST).ended_well
    assert (read(caught + HOST).first_error, read(caught + HOST).ended_well) == ("", True)
    assert read(caught + HOST.replace("finished", "interrupted")).first_error.startswith("ValueError")
    for last in (caught, "Killed\n"):
        reading = read(HOST + last)
        assert reading.failed
        assert not reading.ended_well
    assert not read("step 1 loss 2.0\n").ended_well
    known = read(f"{C10D} 10.0.0.1:1\n" + HOST)
    assert (known.explained, known.ended_well) == (True, False)


# (the log, the status, what is said of it)
STATUSES: dict[str, tuple[str | None, int, str]] = {
    "of a healthy host": (HOST, 0, "no known failure in this log, and that run ended well"),
    "of a healthy torchrun": (HEALTHY["torchrun"], 0, "no known failure in this log (5 lines)"),
    "with a known failure": (f"{C10D} 192.0.0.1:1234\n", 1, "a known failure"),
    "with an unknown traceback": (
        trace("", "ValueError: no such colour"),
        2,
        "ValueError: no such colour (line 4)",
    ),
    "with an unknown traceback under torchrun": (
        trace("", "ValueError: no such colour") + summary((0, -15), (1, 1)),
        2,
        "an unknown failure",
    ),
    "with an unknown traceback from which others suffered": (
        trace("[rank0]: ", GONE) + trace("[rank1]: ", "ValueError: no such colour") + summary((0, 1), (1, 1)),
        2,
        "rank 1: ValueError: no such colour (line 8)",
    ),
    "with a crash": (summary((0, -15), (1, -11)), 2, "failed first, by SIGSEGV"),
    "with a rank that was killed": (trace("[rank0]: ", GONE) + summary((0, 1), (1, -9)), 1, "killed from outside"),
    "with a lost rank alone": (trace("[rank0]: ", GONE) + summary((1, -15), (0, 1)), 1, "known failures in"),
    "with an exit status": ("step 1\nexit status 3\n", 2, "an unknown failure"),
    "empty": ("", 2, "is empty"),
    "missing": (None, 2, "No such file"),
}


@pytest.mark.parametrize("name", STATUSES)
@pytest.mark.parametrize("blocked", [False, True])
def test_the_status_is_of_the_log_whatever_the_machine(
    name: str, blocked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, status, words = STATUSES[name]
    case = Case(here=linux(disk=Disk(path="/x", writable=False)) if blocked else linux())
    assert examine(case).healthy is not blocked
    (tmp_path / "facts.json").write_text(to_json(case), encoding="utf-8")
    if text is not None:
        (tmp_path / "run.log").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    assert run(["doctor", "--error", "run.log", "--facts", "facts.json"]) == status
    told = capsys.readouterr()
    assert words in told.out + told.err
    if text:
        assert run(["doctor", "--error", "run.log", "--facts", "facts.json", "--json"]) == status
        assert json.loads(capsys.readouterr().out)["healthy"] is (status == 0 and not blocked)
    assert run(["doctor", "--facts", "facts.json"]) == int(blocked)


def test_ranks_at_different_collectives_are_told_from_one_that_hangs() -> None:
    assert codes(f"{WATCHDOG.format(0, 808)}\n{WATCHDOG.format(1, 808)}") == ["watchdog-timeout"]
    found = read(f"{WATCHDOG.format(0, 96120)}\n{WATCHDOG.format(7, 64088)}").findings
    assert [f.code for f in found] == ["ranks-out-of-step", "watchdog-timeout"]
    assert "rank 0 was at collective 96120 and rank 7 at 64088" in found[0].what
    assert 16 in found[0].pains
    assert "1 more such line" in found[1].how


def test_what_potluck_said_itself_is_told_with_its_hint() -> None:
    text = "step 1\nerror: port 7171 is taken\nhint: choose another with --port\nsee: potluck explain port-taken\n"
    (finding,) = read(text).findings
    assert (finding.code, finding.fix) == ("potluck-port-taken", "choose another with --port")
    assert "port 7171 is taken" in finding.what
    (raised,) = read("potluck.errors.RankGoneError: rank 1 ended in the middle of all_reduce 7\n").findings
    assert raised.code == "potluck-rank-gone"


def test_the_most_telling_line_is_quoted_with_its_figures() -> None:
    store = (
        "RendezvousConnectionError: The connection to the C10d store has failed. See inner exception for details."
    )
    (finding,) = read(f"{store}\n{C10D} (192.168.1.5, 29400).\n").findings
    assert finding.fix.startswith("potluck doctor 192.168.1.5:29400")
    assert finding.how.startswith("line 2: ")
    (taken,) = read(
        "port: 29615, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
    ).findings
    assert taken.fix.startswith("potluck doctor --port 29615")


# -- secrets ----------------------------------------------------------------------------------------------------

TOKEN = "potluck3-" + "Abc_-9" * 20


@pytest.mark.parametrize(
    "secret",
    [
        TOKEN,
        "hf_abcdefgh12345678",
        "https://me:hunter22@host/",
        "WANDB_API_KEY=0123456789abcdef",
        "token: s3cr3tvalue",
    ],
)
def test_secrets_in_a_quoted_line_are_left_out(secret: str) -> None:
    for text in (f"{secret} EADDRINUSE here", f"EADDRINUSE {secret}", f"{C10D} 10.0.0.1:1 {secret}"):
        (finding,) = read(text).findings
        assert "(left out)" in finding.how
        assert secret not in json.dumps([finding.what, finding.how, finding.fix])
    assert "hunter22" not in redacted(secret)


def test_only_the_line_is_quoted_and_not_more_than_is_read() -> None:
    (finding,) = read("before " * 500 + "EADDRINUSE " + "after " * 500 + "\nmy private line\n").findings
    assert "EADDRINUSE" in finding.how
    assert len(finding.how) < MOST_QUOTED + 20
    assert "private" not in finding.how


# -- any text, any file -----------------------------------------------------------------------------------------

PIECES = [m for _, _, m in MESSAGES] + [
    "\n",
    "\r",
    "\x1b[",
    "\0",
    "Root Cause",
    "exitcode : -9",
    "rank : x",
    "é",
    TOKEN,
]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=30)), max_size=20), st.integers(0, 2**32))
def test_any_text_is_read_and_quoted_without_tokens(pieces: list[str], seed: int) -> None:
    text = "".join(pieces)
    cut = random.Random(seed).randrange(len(text) + 1)
    for reading in (read(text), read_log([Part(1, text[:cut]), Part(1000, text[cut:])], "x y.log")):
        for finding in reading.findings:
            assert TOKEN not in finding.what + finding.how + finding.fix
            assert len(finding.how) < 400


def test_logs_in_other_encodings_are_read(tmp_path: Path) -> None:
    for raw in (
        "EADDRINUSE é\r\n".encode("utf-16"),
        b"\xef\xbb\xbfEADDRINUSE\n",
        b"EADDRINUSE \xff\xfe latin \xe9\n",
    ):
        file = tmp_path / "log"
        file.write_bytes(raw)
        parts, _ = read_parts(file)
        assert codes(parts[0].text) == ["port-in-use"]
        assert decoded(raw) == parts[0].text


def test_a_long_log_is_read_at_both_ends_with_true_line_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_file, "HEAD_BYTES", 1000)
    monkeypatch.setattr(log_file, "TAIL_BYTES", 3000)
    monkeypatch.setattr(log_file, "_PIECE", 700)
    lines = [f"line {n}" for n in range(1, 2001)]
    lines[9], lines[999], lines[1994] = f"{C10D} 10.0.0.1:1", "CUDA out of memory. Tried to allocate", "EADDRINUSE"
    file = tmp_path / "log"
    file.write_text("\n".join(lines))
    parts, left_out = read_parts(file)
    assert left_out == file.stat().st_size - 4000
    reading = read_log(parts, "log", left_out)
    assert [(f.code, f.how.split(":")[0]) for f in reading.findings] == [
        ("rendezvous-unreached", "line 10"),
        ("port-in-use", "line 1995"),
    ]
    assert reading.lines == 2000


def test_what_is_no_log_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "model.bin").write_bytes(bytes(range(256)) * 40)
    for name, words in (
        ("none", "No such file"),
        (".", "is a folder"),
        ("empty", "is empty"),
        ("model.bin", "not a text file"),
    ):
        with pytest.raises(UserError, match=words) as caught:
            read_parts(tmp_path / name)
        assert caught.value.hint
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    with pytest.raises(UserError, match="standard input is empty"):
        read_parts(Path("-"))


# -- how it looks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 120])
def test_a_log_is_shown_within_the_width_and_its_commands_in_one_line(width: int) -> None:
    everything = "\n".join(message for _, _, message in MESSAGES)
    for text in (everything, "ValueError: nobody knows this\n"):
        reading = read(text, "my runs/a long name of a log.log")
        case = Case(here=linux())
        lines = [line.plain for line in lines_of(case, replace(examine(case), log=reading), width, sys.stdout)]
        commands = {way.partition("   (")[0].strip() for f in reading.findings for way in f.fix.split("\n")}
        for line in lines:
            alone = line.removeprefix("  fix").removeprefix("  try").strip()
            assert len(line) <= width or alone in commands, line
        for command in commands:
            assert any(command in line for line in lines), command
        assert lines.index("tower, as it is now") > len(reading.findings)
    assert any("first error" in line and "line 1: ValueError: nobody" in line for line in lines)
    assert lines[-1] == "this machine: all is well"


def test_flags_that_exclude_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--listen", "--error", "x"]) == 2
    assert "cannot be combined" in capsys.readouterr().err
    assert run(["doctor", "--error", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err
