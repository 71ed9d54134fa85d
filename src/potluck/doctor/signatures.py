"""The table of known messages in logs of failed runs: torchrun, gloo, NCCL and others.

PURE data: each row has the pattern of a message and its meaning. The messages come from the reports listed in
troubleshooting/doctor.md, and from runs made to fail.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from potluck.spec.finding import BLOCKER, NOTE

CAUSE, CONSEQUENCE, ASIDE = 0, 1, 2
"""The kinds of messages: a first failure, a consequence on other ranks, a note that ends no run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """One known message. Its texts may contain the pattern's named groups, and {name}, the log's name."""

    code: str
    words: tuple[str, ...]
    """The line contains one of these literally, which is fast to search."""
    pattern: re.Pattern[str] | None = None
    """The line also matches this pattern."""
    elsewhere: tuple[str, ...] = ()
    """The log also contains one of these somewhere."""
    what: str
    breaks: str
    fix: str
    """Fixes, one per line."""
    potluck: str
    pains: tuple[int, ...]
    kind: int = CAUSE
    hides: tuple[str, ...] = ()
    """Other messages that the same line would match."""
    only_beside_others: bool = False
    """It also appears in healthy logs, so it is reported only if something failed or the log contains nothing
    else."""

    @property
    def severity(self) -> str:
        return NOTE if self.kind == ASIDE else BLOCKER


def _re(text: str) -> re.Pattern[str]:
    return re.compile(text, re.IGNORECASE)


# Nothing in here may repeat within a repetition: logs are long, and anybody's.
_ADDRESS = r"\(?\[?(?P<address>[\w.:%-]{1,80}?)\]?(?:, |\]:|:)(?P<port>\d{1,5})\)?"
_BETWEEN = (" ", ": ", "=", " = ", "': ", '": ', " is ")
_OWN_TRANSPORT = "has its own transport, which the same machines use whatever their systems"
JOIN = "with model.join():   (DDP's own, around the loop over batches)\n"
JOIN += "DataLoader(…, drop_last=True)   (with a DistributedSampler: as many batches for all)"
_EARLIEST = "grep -nE 'Error|Killed|Signal' {name} | head -3   (the earliest is the cause)"
_INTERFACE = "export GLOO_SOCKET_IFNAME=$(ip -4 route get MASTER_ADDR | grep -oP 'dev \\K\\S+')"
_NO_RDMA = "uses TCP only: it offers no RDMA"
_RDMA_FIX = "ibv_devinfo   (on both machines: is the port's state PORT_ACTIVE?)\n"
_RDMA_FIX += "ib_write_bw -d mlx5_0 ADDRESS   (perftest: does RDMA work without NCCL?)\n"
_NEVER_STOPS = "cannot happen: a guest that dies, sleeps or is late costs its own share of a step, which the host "
_NEVER_STOPS += "computes itself; after 5 silent seconds it is removed, by name, and the run continues"

CONNECTING: tuple[Signature, ...] = (
    Signature(
        code="gloo-mac-and-linux",
        words=("address family mismatch",),
        what="gloo on a Mac and gloo on Linux cannot talk to each other",
        breaks="every process group of gloo between these two; without this message both hang until the timeout",
        fix="potluck host train.py   (and potluck join TOKEN on the other)",
        potluck=f"cannot happen: {_OWN_TRANSPORT}. init_process_group('potluck') is a backend of it",
        pains=(1,),
    ),
    Signature(
        code="mps-has-no-backend",
        words=("device type mps", "device=mps", "detected accelerator mps", "MPSAccelerator"),
        pattern=_re(
            r"no backend type associated with device type mps|invalid tensor type.{0,200}device=mps"
            r"|detected accelerator mps.{0,80}communication backend|strategy.{0,80}not support.{0,80}MPSAccelerator"
        ),
        what="tensors on a Mac's GPU (MPS) were given to a backend that takes none: gloo and NCCL do not know MPS",
        breaks="DDP and every collective on MPS tensors",
        fix="init_process_group('potluck')   (after import potluck)\ntensor.cpu()   (before each collective)",
        potluck="cannot happen: tensors of every device are sent through host memory, in runs and in its backend",
        pains=(2,),
    ),
    Signature(
        code="gloo-variable-syntax",
        words=("Unable to find address for", "Unable to find interface for"),
        pattern=_re(r"unable to find (?:address|interface) for:? ?(?P<given>\S{1,60})"),
        what="GLOO_SOCKET_IFNAME names {given}, which is no interface of this machine",
        breaks="gloo ends when the group is made. It takes plain names, no ^ and no prefixes as NCCL does",
        fix=_INTERFACE,
        potluck="does not read that variable: it takes the interface that the route to the other machine leaves by",
        pains=(4, 3),
    ),
    Signature(
        code="loopback-taken",
        words=("loopback address as fallback", "remote=[127.", "Unable to resolve hostname to a (local) address"),
        pattern=_re(
            r"loopback address as fallback|unable to resolve hostname to a \(local\) address"
            r"|connection refused.{0,60}remote=\[127\.|remote=\[127\..{0,120}connection refused"
        ),
        what="gloo chose the loopback address 127.x, at which no other machine can reach this one",
        breaks="ranks on other machines: 'Connection refused', or a hang until the timeout",
        fix=f"{_INTERFACE}\npotluck doctor   (does /etc/hosts map this machine's name to 127.0.x.1?)",
        potluck="cannot happen: a host listens on the address of the default route, and a token holds addresses",
        pains=(3, 5),
        hides=("gloo-unreached",),
    ),
    Signature(
        code="gloo-unreached",
        words=("connectFullMesh failed",),
        what="gloo did not connect the ranks to each other, though they had met at the rendezvous",
        breaks="the start: a rank told the others an address at which they do not reach it, or a firewall blocks",
        fix=f"{_INTERFACE}\npotluck doctor --listen   (and its line on the other machine: which side blocks?)",
        potluck="guests connect to the host only, at an address that the token holds; no machine needs the others'",
        pains=(3, 6),
    ),
    Signature(
        code="nccl-unreached",
        words=("Connect to ", "socketPollConnect", "Call to connect"),
        pattern=_re(
            r"NCCL WARN.{0,120}connect\w{0,5}:? (?:to )?(?:connect )?(?:to )?"
            r"(?P<address>[\w.:%-]{2,80}(?=<\d{1,5}>)|[\w.%-]{2,80}(?=:\d{1,5}\b))"
            r"|NCCL WARN (?:socketPollConnect poll\(\) |Call to connect timeout)"
        ),
        what="NCCL did not reach {address}: a firewall blocks it, or NCCL's interface does not lead there",
        breaks="the start, after the rendezvous: NCCL listens at ports of its own choice, on each machine. "
        "Containers' and VPNs' interfaces are tried, too",
        fix="potluck doctor --listen   (and its line on the other machine: does a firewall block?)\n"
        "export NCCL_SOCKET_IFNAME=eth0   (the one that potluck doctor marks as used, on each machine)",
        potluck="takes the interface that the route to the other machine leaves by",
        pains=(3,),
        hides=("no-route",),
    ),
    Signature(
        code="nccl-no-interface",
        words=("no socket interface found",),
        what="NCCL found no interface to use",
        breaks="the start, on this machine: NCCL_SOCKET_IFNAME names no interface of it, or none has an address",
        fix="grep -n 'NCCL_SOCKET_IFNAME set' {name}   (what was it? names are matched by their beginning)\n"
        "export NCCL_SOCKET_IFNAME=eth0   (the one that potluck doctor marks as used, on each machine)",
        potluck="does not read that variable: it takes the interface that the route to the other machine leaves by",
        pains=(3, 4),
    ),
    Signature(
        code="nccl-rdma-no-answer",
        words=("Got completion from peer", "ot completion with"),
        pattern=_re(
            r"got completion (?:from peer (?P<address>[\w.:%-]{2,80})<\d{1,5}> )?with "
            r"(?:status=|error )(?:\w{1,40}\()?1[23]\b"
        ),
        what="the InfiniBand or RoCE card sent to {address} and got no answer (status 12 or 13)",
        breaks="the run: TCP reaches that machine, RDMA does not. A port is down, the two cards are on different "
        "networks, RoCE uses a wrong address (GID), or that rank died",
        fix=f"{_RDMA_FIX}export NCCL_IB_GID_INDEX=3   (RoCE: show_gids lists it as v2 with an IPv4 address)\n"
        "export NCCL_IB_DISABLE=1   (over TCP: if that works, RDMA is at fault)",
        potluck=_NO_RDMA,
        pains=(3, 17),
    ),
    Signature(
        code="nccl-rdma-failed",
        words=(
            "Got completion from peer",
            "ot completion with",
            "ibv_modify_qp failed",
            "ibv_modify_qp_log failed",
        ),
        pattern=_re(
            r"NCCL WARN.{0,80}got completion .{0,120}?with (?:status=|error )(?!(?:\w{1,40}\()?1[23]\b)"
            r"|NCCL WARN.{0,40}ibv_modify_qp(?:_log)? failed"
        ),
        what="InfiniBand or RoCE failed between two machines that reach each other over TCP",
        breaks="the run. 'ibv_modify_qp': the cards' addresses (GIDs) do not fit together, or there is no route "
        "between them. Status 5: only what followed from an earlier failure. Status 4 or 10: memory that a card "
        "may not use",
        fix=f"{_RDMA_FIX}export NCCL_IB_HCA=mlx5_0   (the same network's card on each machine)\n"
        "export NCCL_IB_DISABLE=1   (over TCP: if that works, RDMA is at fault)",
        potluck=_NO_RDMA,
        pains=(3,),
        hides=("no-route", "other-rank-gone"),
    ),
    Signature(
        code="nccl-locked-memory",
        words=("ibv_reg_mr", "ibv_create_qp", "ibv_create_cq"),
        pattern=_re(r"call to ibv_\w{3,40} failed.{0,20} cannot allocate memory"),
        what="the InfiniBand or RoCE card may not lock as much memory as NCCL wants",
        breaks="the start, on this machine: the limit of locked memory is too small, often in a container",
        fix="ulimit -l   (what is the limit? It should be unlimited, in the launched process, too)\n"
        "docker run --ulimit memlock=-1 …   (a machine without a container: /etc/security/limits.conf)",
        potluck=_NO_RDMA,
        pains=(3,),
    ),
    Signature(
        code="nccl-shared-memory",
        words=("shared memory segment", "failed to extend /dev/shm", "posix_fallocate failed"),
        pattern=_re(
            r"NCCL WARN (?:error while (?:creating|attaching to) shared memory segment"
            r"|error: failed to extend /dev/shm|call to posix_fallocate failed)"
        ),
        what="NCCL could not use shared memory (/dev/shm) between the ranks of this machine",
        breaks="the start, on this machine: /dev/shm is full or small. Docker gives a container 64 MB of it",
        fix="df -h /dev/shm; ls /dev/shm/nccl-*   (full? Those of ended runs can be removed)\n"
        "docker run --ipc=host …   (or --shm-size=1g; Kubernetes: an emptyDir with medium: Memory at /dev/shm)\n"
        "export NCCL_SHM_DISABLE=1   (slower; it shows whether this is the cause)",
        potluck="guests use none; on Linux its backend takes memfd, which the size of /dev/shm does not limit",
        pains=(19,),
    ),
    Signature(
        code="local-network-privacy",
        words=("errno: 65", "Errno 65", "errno=65", "error 65"),
        pattern=_re(r"err(?:no|or)[:= ]{1,2}65\b"),
        what="macOS does not let this app reach machines on its own network (errno 65, though ping works)",
        breaks="every connection to a machine on the same network, from this terminal app only",
        fix="System Settings → Privacy & Security → Local Network: allow your terminal app",
        potluck="needs the same permission; potluck doctor ADDRESS tells this case from a machine that is off",
        pains=(7,),
        hides=("no-route",),
    ),
    Signature(
        code="not-everybody-came",
        words=("clients joined",),
        pattern=_re(r"waiting for clients\. (?P<came>\d{1,6})/(?P<world>\d{1,6}) clients joined"),
        what="{came} of {world} processes came to the rendezvous, and it waited for the rest until the timeout",
        breaks="the whole start. A launcher that divides evenly (accelerate) leaves some out where machines have "
        "different numbers of GPUs",
        fix="torchrun --nnodes … --nproc-per-node N   (N: the GPUs of that machine)\n"
        "potluck doctor MASTER_ADDR:MASTER_PORT   (on a machine whose processes did not come)",
        potluck="cannot happen: there is no number of processes to wait for. Every machine that joins helps",
        pains=(15, 6),
    ),
    Signature(
        code="rendezvous-unreached",
        words=(
            "C10d store",
            "client socket has timed out",
            "client socket has failed",
            "connect() timed out",
            "RendezvousTimeoutError",
        ),
        pattern=_re(
            r"client socket has (?:timed out after \S{1,20} while trying to connect to"
            rf"|failed to connect to any network address of) {_ADDRESS}"
            r"|connection to the C10d store has failed|connect\(\) timed out\. Original timeout"
            r"|RendezvousTimeoutError"
        ),
        what="this machine did not reach the rendezvous at {address} port {port}",
        breaks="torchrun and init_process_group end after a wait: a firewall, a wrong address, or nobody listens",
        fix="potluck doctor {address}:{port}   (which side blocks? Does torchrun run there?)",
        potluck="only the host must be reachable; potluck doctor TOKEN tries both directions before a run",
        pains=(6,),
    ),
    Signature(
        code="no-route",
        words=("No route to host", "Network is unreachable"),
        what="this machine has no route to another machine of the group",
        breaks="the start: machines on different networks, a guest Wi-Fi that keeps them apart, or a wrong address",
        fix="potluck doctor ADDRESS   (of the other machine: it says what is in between)",
        potluck="joins over any network on which one can reach the host, a VPN such as Tailscale included",
        pains=(6, 11),
    ),
    Signature(
        code="port-in-use",
        words=("EADDRINUSE", "ddress already in use", "WinError 10048"),
        pattern=_re(
            r"(?:(?:port: |(?:bind to|listen on) \S{1,40}:)(?P<port>\d{1,5})\b.{0,90}?)?"
            r"(?:EADDRINUSE|address already in use|WinError 10048)"
        ),
        what="the port ({port}) is taken: by an earlier run that is still there, or by another user's",
        breaks="every process that was given this port: by --master-port, MASTER_PORT or --rdzv-endpoint. "
        "torchrun over several machines uses 29500 if no port is given",
        fix="potluck doctor --port {port}   (who has it, and what is left of earlier runs?)\n"
        "torchrun --standalone --nproc-per-node N …   (one machine, no --master-port: a free port is taken)",
        potluck="takes a free port by default, and a guest ends itself when its host or its terminal is gone",
        pains=(9, 19),
    ),
    Signature(
        code="ipv6-half-there",
        words=("Address family not supported", "errno: 97", "IPv6 network addresses of"),
        pattern=_re(
            r"address family not supported by protocol|errno: 97\b"
            r"|IPv6 network addresses of .{1,120} cannot be retrieved"
        ),
        what="torch tried IPv6 first, and this machine has none",
        breaks="nothing by itself: it continues with IPv4. If the run hangs after it, a name gave an IPv6 address",
        fix="export MASTER_ADDR=192.168.1.5   (an address, not a name)\npotluck doctor   (is IPv6 half on?)",
        potluck="uses one family, IPv4, and addresses, not names",
        pains=(10,),
        kind=ASIDE,
        hides=("name-look-ups",),
        only_beside_others=True,
    ),
    Signature(
        code="name-look-ups",
        words=("client socket cannot be retrieved", "gai error", "name resolution", "nodename nor servname"),
        pattern=_re(
            r"hostname of the client socket cannot be retrieved|gai error:? ?-?\d|failure in name resolution"
            r"|nodename nor servname provided"
        ),
        what="a machine's name could not be looked up",
        breaks="each look-up that fails costs up to ten seconds; where MASTER_ADDR is such a name, the start",
        fix="export MASTER_ADDR=192.168.1.5   (an address, not a name)\n"
        "echo '192.168.1.5 tower' | sudo tee -a /etc/hosts   (for each machine)",
        potluck="looks up no names: a token holds addresses. potluck doctor times the resolver",
        pains=(8,),
        kind=ASIDE,
        only_beside_others=True,
    ),
)

RUNNING: tuple[Signature, ...] = (
    Signature(
        code="unequal-counts-refused",
        words=(
            "same number of processes",
            "same number of devices",
            "only support homogeneous",
            "divisible by the number of machines",
            "divisible by number of machines",
        ),
        pattern=_re(
            r"same number of (?:processes|devices|gpus) (?:per|on each|on every|in each) (?:node|machine|host)"
            r"|DeviceMesh only supports? homogeneous|divisible by (?:the )?number of machines"
        ),
        what="the launcher or the device mesh wants as many processes on every machine",
        breaks="machines with different numbers of GPUs: refused, or some of the GPUs left out",
        fix="torchrun --nnodes 2 --nproc-per-node N …   (N may differ: plain DDP allows it)\n"
        "export CUDA_VISIBLE_DEVICES=0,1   (where there are more, to make them equal)",
        potluck="cannot happen: there is no such rule. A machine is a guest, however many GPUs others have",
        pains=(15,),
    ),
    Signature(
        code="waited-for-a-rank",
        words=("Timed out waiting",),
        pattern=_re(r"timed out waiting (?P<ms>\d{1,12})ms for (?:recv|send) operation"),
        what="a rank waited {ms} ms in a collective that another rank never came to",
        breaks="the run, at this rank; the others follow. Most often at an epoch's end: the other rank had fewer "
        "batches and left the loop. Else it died or took another branch",
        fix=f"{JOIN}\n{_EARLIEST}",
        potluck="cannot happen: no machine has batches of its own. The ledger deals each step's samples to the "
        "present machines, and takes back what is not delivered",
        pains=(16, 17),
        kind=CONSEQUENCE,
    ),
    Signature(
        code="collectives-differ",
        words=("mismatch between collectives", "monitoredBarrier"),
        pattern=_re(r"detected mismatch between collectives|failed to pass monitoredBarrier"),
        what="the ranks were not at the same collective: one has more batches, or took another branch",
        breaks="the run (without TORCH_DISTRIBUTED_DEBUG=DETAIL it would hang instead)",
        fix=f"{JOIN}\ngrep -n 'rank == 0' train.py   (no collective in such a branch)",
        potluck="cannot happen: a loop calls no collectives; the host counts what arrives, sample by sample",
        pains=(16,),
    ),
    Signature(
        code="watchdog-timeout",
        words=("Watchdog caught collective operation timeout",),
        pattern=_re(
            r"\[rank (?P<rank>\d{1,6})\] watchdog caught collective operation timeout: "
            r"\w{1,20}\((?:SeqNum=(?P<seq>\d{1,12}), )?OpType=(?P<op>\w{1,40}).{0,160}?"
            r" ran for (?P<ms>\d{1,12}) milli"
        ),
        what="rank {rank} waited {ms} ms in {op} for ranks that never came; NCCL's watchdog then ended it",
        breaks="the whole run, ten to thirty minutes later. The rank that writes this was waiting; another rank "
        "caused it",
        fix=f"{_EARLIEST}\n{JOIN}\ninit_process_group(…, timeout=timedelta(minutes=5))   (for a shorter wait)",
        potluck=_NEVER_STOPS,
        pains=(17, 16),
        kind=CONSEQUENCE,
    ),
    Signature(
        code="other-rank-gone",
        words=(
            "Connection closed by peer",
            "Connection reset by peer",
            "Broken pipe",
            "Connection closed by remote peer",
            "ncclRemoteError",
            "Did the remote server shutdown or crash",
        ),
        pattern=_re(
            r"gloo/.{0,200}(?:connection closed by peer|connection reset by peer|broken pipe)"
            r"|NCCL WARN.{0,120}(?:connection closed by remote peer|failed ?: broken pipe|connection reset by peer)"
            r"|ncclRemoteError: |did the remote server shutdown or crash"
        ),
        what="another rank is gone: its connection to this one closed in the middle of a collective",
        breaks="every other rank, at its next collective. The cause is in the log of the rank that ended first",
        fix=_EARLIEST,
        potluck=_NEVER_STOPS,
        pains=(17,),
        kind=CONSEQUENCE,
    ),
    Signature(
        code="elastic-ended-all",
        words=("RendezvousClosedError", "death signal", "keep-alive heartbeat", "got signal: "),
        pattern=_re(
            r"RendezvousClosedError|received (?:signals\.)?(?:15|sigterm) death signal"
            r"|failed to send a keep-alive heartbeat to the rendezvous"
            r"|SignalException: .{0,40}got signal: (?:signals\.)?(?:15|sigterm)\b"
        ),
        what="a torchrun agent was ended, and the rendezvous closed for all: --nnodes 1:N did not carry on",
        breaks="all machines; --max-restarts counts ends of workers, not of agents",
        fix="torchrun …   (again, on every machine, from the last checkpoint)",
        potluck="cannot happen: guests come and go at any moment, and only the host must stay (it resumes at "
        "exactly the next sample)",
        pains=(18,),
    ),
    Signature(
        code="rendezvous-lost",
        words=("connection to the C10d store has failed",),
        elsewhere=("in _call_store",),
        what="the torchrun agent that kept the rendezvous is gone, in the middle of the run",
        breaks="all machines, though --nnodes 1:N lets any of them leave: this one kept what the others need",
        fix="torchrun …   (again, on every machine, from the last checkpoint)\n"
        "torchrun --rdzv-endpoint HOST:29400 …   (HOST: the machine that stays, started first)",
        potluck="guests come and go at any moment; only the host must stay, and it resumes at the next sample",
        pains=(18,),
        hides=("rendezvous-unreached",),
    ),
    Signature(
        code="terminal-gone",
        words=("got signal: ", "death signal"),
        pattern=_re(
            r"SignalException: .{0,40}got signal: (?:signals\.)?(?:1|sighup)\b"
            r"|received (?:signals\.)?(?:1|sighup) death signal"
        ),
        what="the terminal was closed, or its ssh connection lost: torchrun got a hang-up (SIGHUP)",
        breaks="this run; and processes that did not get the signal stay behind and keep the GPU and the port",
        fix="tmux new -s train   (and start it in there)\npotluck doctor   (what was left behind?)",
        potluck="a guest ends itself when its host or its terminal is gone; a host in tmux continues",
        pains=(19,),
    ),
    Signature(
        code="out-of-memory",
        words=("out of memory. Tried to allocate", "'out of memory'"),
        pattern=_re(
            r"\b(?:CUDA|HIP|XPU) out of memory\. Tried to allocate"
            r"|NCCL WARN.{0,40}(?:Cuda|HIP) failure (?:\d{1,4} )?'out of memory'"
        ),
        what="a GPU has no memory left",
        breaks="that rank, and with it all others. With equal batches the smallest card decides for all",
        fix="a smaller batch and more accumulation steps, on every rank",
        potluck="each machine finds the micro-batch that fits its own memory; its share of a step is counted in "
        "samples and weighted exactly",
        pains=(14,),
    ),
    Signature(
        code="mps-out-of-memory",
        words=("MPS backend out of memory",),
        what="the Mac's GPU has no memory left",
        breaks="that rank. (PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 removes the limit; then the whole Mac stalls)",
        fix="a smaller batch on the Mac",
        potluck="a guest finds the micro-batch that fits by itself; if it still dies, the run continues",
        pains=(24,),
    ),
    Signature(
        code="mps-not-a-number",
        words=tuple(f"{w}{between}{n}" for w in ("loss", "Loss") for n in ("nan", "NaN") for between in _BETWEEN),
        elsewhere=("MPS", " mps", "'mps'", '"mps"', "=mps", "mps:0"),
        what="the loss is NaN, on a run with MPS",
        breaks="the model: everything after it is NaN. Some operations on MPS are wrong without an error",
        fix="device = 'cpu'   (for one batch: is the loss different?)\npip install --upgrade torch",
        potluck="compares each guest's gradient with the host's on one batch first; values that are not finite "
        "never count",
        pains=(24,),
    ),
    Signature(
        code="torn-file",
        words=("central directory", "PytorchStreamReader failed", "file might be corrupted", "IncompleteBuffer"),
        pattern=_re(
            r"failed finding central directory|PytorchStreamReader failed reading"
            r"|unexpected EOF.{0,80}file might be corrupted|Safetensor.{0,80}IncompleteBuffer"
        ),
        what="the checkpoint is cut off: it was still being written, or copied, when something ended",
        breaks="resuming from this file. It cannot be repaired",
        fix="ls -lt checkpoints   (take the one before)\n"
        "torch.save(state, 'new'); os.replace('new', 'last.pt')   (so that it does not happen again)",
        potluck="writes to a temporary folder, flushes, renames, keeps two, and checks hashes before it resumes",
        pains=(20,),
    ),
    Signature(
        code="ssh-did-not-enter",
        words=(
            "Permission denied (",
            "exit status 255",
            "exit code 255",
            "Host key verification failed",
            "via ssh",
        ),
        pattern=_re(
            r"permission denied \((?:publickey|password|keyboard)|ssh.{0,200}(?:exit status|exit code) 255"
            r"|host key verification failed|not reachable via ssh"
        ),
        what="the launcher could not log in to a machine by ssh without a password",
        breaks="the start on that machine, and so everywhere",
        fix="ssh-copy-id you@machine\npotluck doctor --cluster fleet.toml   (tries each of them)",
        potluck="needs no ssh: a person types potluck join TOKEN on each machine",
        pains=(21,),
    ),
    Signature(
        code="versions-differ",
        words=("Version mismatch: The cluster", "Mismatched NCCL version", "this token is of protocol"),
        what="the machines run different versions",
        breaks="the start: refused",
        fix="pip freeze > versions.txt   (on one; on the others: pip install -r versions.txt)",
        potluck="only its protocol must match; other torch versions are allowed, and checked on one batch",
        pains=(22,),
    ),
    Signature(
        code="windows-without-libuv",
        words=("without libuv support",),
        what="torchrun on Windows asked for libuv, which this torch was built without",
        breaks="every start of torchrun and init_process_group on this machine",
        fix="$env:USE_LIBUV=0   (PowerShell; cmd: set USE_LIBUV=0)\nwsl --install   (and run it in there)",
        potluck="does not use it. It has not been tried on Windows itself yet; in WSL2 it runs as on Linux",
        pains=(23,),
    ),
    Signature(
        code="no-nccl-here",
        words=("have NCCL built in",),
        what="NCCL was asked for, and this torch has none: Windows, macOS, or a build without CUDA",
        breaks="init_process_group('nccl') on this machine",
        fix="init_process_group('gloo')   (or 'potluck', after import potluck)\n"
        "potluck doctor   (which torch is here?)",
        potluck="needs no NCCL",
        pains=(23, 2),
    ),
    Signature(
        code="one-thread-each",
        words=("Setting OMP_NUM_THREADS",),
        pattern=_re(r"setting OMP_NUM_THREADS environment variable for each process to be 1\b"),
        what="torchrun gave every process one CPU thread",
        breaks="nothing on GPUs; a machine that computes on its CPU uses one core of many",
        fix="export OMP_NUM_THREADS={cores}   (the machine's physical cores; divide by the processes on it)",
        potluck="counts the physical cores itself and uses them",
        pains=(25,),
        kind=ASIDE,
        only_beside_others=True,
    ),
)

SIGNATURES: tuple[Signature, ...] = (*CONNECTING, *RUNNING)
