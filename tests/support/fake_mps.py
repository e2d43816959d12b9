"""A `nvidia-cuda-mps-control` that behaves as the real one does towards who starts and ends it, without a GPU.

In the foreground (`-f`) it makes the files of a daemon, and for the first `start_server` a child with the name of the
server; otherwise it sends the commands on its input to the daemon and prints the answers. `MPS_FAKE` chooses a fault:
`refuses` exits at once, `no-server` starts none, `stays` ignores `quit`. SIGUSR1 has it log a fault on a GPU. Good
enough since nothing here looks at what the server does for its clients.
"""

from __future__ import annotations

import sys
from pathlib import Path

PROGRAM = """#!{python} -IS
import os, signal, socket, subprocess, sys
from pathlib import Path

folder, logs = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"]), Path(os.environ["CUDA_MPS_LOG_DIRECTORY"])
fault = os.environ.get("MPS_FAKE", "")
NAMED = "import ctypes, signal; ctypes.CDLL(None).prctl(15, NAME, 0, 0, 0); print('up', flush=True); signal.pause()"

def named(name):
    import ctypes
    ctypes.CDLL(None).prctl(15, name, 0, 0, 0)

def start_server():
    child = subprocess.Popen([sys.executable, "-IS", "-c", NAMED.replace("NAME", "b'nvidia-cuda-mps-server'")],
                             stdout=subprocess.PIPE)
    child.stdout.readline()
    return child

def daemon():
    named(b"nvidia-cuda-mps-control")
    if fault == "refuses":
        sys.exit("Cannot start: no permission")
    assert folder.stat().st_mode & 0o777 == 0o700
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "control"))
    listener.listen()
    fatal = b"Client {{PID: 1}} encountered a fatal GPU error.\\nServer is handling a fatal GPU error.\\n"
    signal.signal(signal.SIGUSR1, lambda *_: os.write(1, fatal))
    (folder / "nvidia-cuda-mps-control.pid").write_text(str(os.getpid()))
    (logs / "server.log").write_text("the driver refuses\\n" if fault == "no-server" else "")
    servers = []
    while True:
        client, _ = listener.accept()
        command = client.makefile().readline().split()
        answer = ""
        if command[:1] == ["start_server"] and fault != "no-server":
            servers = servers or [start_server()]
        elif command[:1] == ["get_server_status"]:
            answer = "ACTIVE\\n"
        elif command == ["get_server_list"]:
            answer = "".join(f"{{each.pid}}\\n" for each in servers if each.poll() is None)
        elif command[:1] == ["quit"] and fault != "stays":
            for each in servers:
                each.kill()
                each.wait()
            (folder / "control").unlink()
            client.close()
            sys.exit(0)
        client.sendall(answer.encode())
        client.close()

def client():
    for line in sys.stdin:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(folder / "control"))
        except OSError:
            sys.exit("Cannot find MPS control daemon process")
        connection.sendall(line.encode())
        while part := connection.recv(4096):
            sys.stdout.write(part.decode())

daemon() if sys.argv[1:] == ["-f"] else client()
"""


def install(folder: Path) -> Path:
    """Write the program into a folder for PATH; returns the folder."""
    folder.mkdir(exist_ok=True)
    program = folder / "nvidia-cuda-mps-control"
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    return folder
