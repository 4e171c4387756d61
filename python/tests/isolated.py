"""Runs the cases of battery.py in processes beside this one, some at once: a case that crashes or hangs ends its process and no other's
cases. What a program that is started with --worker is asked for comes to it by its standard input."""

import faulthandler
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading

import battery

LINES, COLUMNS = 14, 220  # of what a failure says


def work(seconds, left_over):
    """Is a worker: of each request a line for what was run, and one at its end. `left_over()`: what it should not have left, as text."""
    said = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        number, type_name, name, everything = json.loads(line)
        faulthandler.dump_traceback_later(seconds, exit=True)
        is_wrong = False
        for result in battery.results_of(number, type_name, everything):
            is_wrong |= bool(result[1])
            print(json.dumps(result), file=said, flush=True)
            del result
        if not is_wrong and (found := left_over()):
            print(json.dumps([f"{name}/after", found, 0.0]), file=said, flush=True)
        faulthandler.cancel_dump_traceback_later()
        print("null", file=said, flush=True)


class _Worker:
    def __init__(self):
        self.errors = tempfile.TemporaryFile("a+", encoding="utf-8", errors="replace")
        self.process = subprocess.Popen([sys.executable, "-X", "faulthandler", sys.argv[0], "--worker", *sys.argv[1:]], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=self.errors, text=True)

    def run(self, variant, everything):
        """Results; the last one is of the process, where it has ended."""
        self.errors.truncate(0)
        try:
            print(json.dumps([*variant, everything]), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            pass
        for line in self.process.stdout:
            result = json.loads(line)
            if result is None:
                return
            yield result
        code = self.process.wait()
        self.errors.seek(0)
        yield variant[2], f"the process has ended with {code}:\n{self.errors.read()}", 0.0

    def end(self):
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def shortened(text):
    """The last lines, which tell most; of what the faulthandler has written the first."""
    lines = [line[:COLUMNS] for line in text.splitlines() if line.strip(" ^~")]
    begun = next((i for i, line in enumerate(lines) if line.startswith(("Fatal Python error", "Timeout (", "Thread 0x", "Current thread"))), None)
    if begun is not None:
        return "\n".join(lines[:1] + lines[max(begun - 3, 1):begun + 2 * LINES])
    return "\n".join(lines[-LINES:])


def main(groups, workers, everything, report):
    """`groups`: lists of battery.chosen() that one process runs one after another. `report(name, wrong, seconds)` hears of each."""
    waiting, lock = queue.SimpleQueue(), threading.Lock()
    for group in groups:
        waiting.put(group)

    def serve():
        worker = None
        while True:
            try:
                group = waiting.get_nowait()
            except queue.Empty:
                break
            for variant in group:
                if worker is None:
                    worker = _Worker()
                is_wrong = False
                for result in worker.run(variant, everything):
                    is_wrong |= bool(result[1])
                    with lock:
                        report(*result)
                if is_wrong:  # what it has left behind is no concern of the next one
                    worker.end()
                    worker = None
        if worker is not None:
            worker.end()

    threads = [threading.Thread(target=serve) for _ in range(workers)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
