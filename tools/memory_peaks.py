"""What the processes of a run hold at most, apart by kind, whatever else runs on the machine.

  anonymous  heap, stacks, written pages of private mappings. The kernel keeps the peak of a process's resident set; file-backed and
             shared pages stay in it once they were touched, so that what the peak has beyond those is anonymous. No process
             is sampled: once a step its peak is read and begins anew, and no moment is missed.
  shared     memfds and other memory that processes share: what is mapped proportionally, and allocated blocks that nobody has touched.
  files      text of programs and libraries and other mapped files, proportionally, also among strangers: it depends on who else runs.

Used by tools/rank_costs.
"""

import collections

from trainer_run import RunFailed, kernel_bytes, untouched_bytes

RESET_PEAK = "5"  # to /proc/PID/clear_refs

Peaks = collections.namedtuple("Peaks", "anonymous shared files")


def reset_peak(pid):
    try:
        with open(f"/proc/{pid}/clear_refs", "w", encoding="utf-8") as file:
            file.write(RESET_PEAK)
    except (FileNotFoundError, ProcessLookupError):
        pass  # it has ended
    except OSError as error:
        raise RunFailed(f"the peak of process {pid} cannot begin anew: {error}") from None


class MemoryPeaks:
    """The peaks of a run's processes, in bytes, over the steps that were counted."""

    def __init__(self, run):
        self._run = run
        self._anonymous = collections.Counter()  # of each process, its own peak
        self._stays = collections.Counter()  # and what it had mapped of the other kinds: at its end it unmaps
        self._shared, self._files = 0, 0

    def mark(self, counts):
        """A step has ended; `counts`: it is one of those. Its processes' peaks begin anew."""
        processes = self._run.processes()
        mapped = collections.Counter()
        for pid in processes:
            status = kernel_bytes(pid, "status")
            if "VmHWM" not in status:
                continue  # it has ended: ranks do not wait for the first one's last line
            reset_peak(pid)
            self._stays[pid] = max(self._stays[pid], status["RssFile"] + status["RssShmem"])
            if counts:
                self._anonymous[pid] = max(self._anonymous[pid], status["VmHWM"] - self._stays[pid])
                mapped.update(kernel_bytes(pid, "smaps_rollup"))
        untouched = untouched_bytes(processes) if counts else 0
        # What one that ends meanwhile no longer shares is the others' alone: proportions of several moments are no sum.
        if counts and all("VmHWM" in kernel_bytes(pid, "status") for pid in processes):
            self._shared = max(self._shared, mapped["Pss_Shmem"] + untouched)
            self._files = max(self._files, mapped["Pss_File"])

    def peaks(self):
        """Returns the sum of the processes' own peaks, which is at least what they held together, of each kind."""
        return Peaks(sum(self._anonymous.values()), self._shared, self._files)
