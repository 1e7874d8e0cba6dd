package launch

import (
	"bytes"
	"os"
	"strconv"
	"syscall"
	"time"
)

// prSetChildSubreaper is PR_SET_CHILD_SUBREAPER of prctl(2): orphaned
// descendants become children of this process instead of init's.
const prSetChildSubreaper = 36

func becomeReaper() {
	// A kernel without it leaves the process groups, which are killed anyway.
	_, _, _ = syscall.RawSyscall(syscall.SYS_PRCTL, prSetChildSubreaper, 1, 0)
}

// killLeftovers kills what the workers have left behind: first their process
// groups, then whoever left its group and has become this process's child.
func killLeftovers(groups []int) {
	for _, pid := range groups {
		_ = syscall.Kill(-pid, syscall.SIGKILL) // ESRCH is the usual case
	}
	// Each death may hand us further orphans.
	for range 100 {
		left := adopted(nil)
		if len(left) == 0 {
			return
		}
		for _, p := range left {
			_ = syscall.Kill(p.pid, syscall.SIGKILL)
		}
		for _, p := range left {
			waitFor(p.pid)
		}
	}
}

// waitFor collects a child that is about to end, for at most a second: one in
// an uninterruptible system call ends when the kernel lets it.
func waitFor(pid int) {
	for deadline := time.Now().Add(time.Second); time.Now().Before(deadline); {
		var ws syscall.WaitStatus
		got, err := syscall.Wait4(pid, &ws, syscall.WNOHANG, nil)
		if got == pid || err != nil && err != syscall.EINTR {
			return
		}
		time.Sleep(time.Millisecond) // there is no wait4 with a time limit
	}
}

// collectZombies collects adopted processes that have ended. The workers' own
// ends are awaited elsewhere and must not be taken from there.
func collectZombies(workers map[int]bool) {
	for _, p := range adopted(workers) {
		if p.zombie {
			_, _ = syscall.Wait4(p.pid, nil, syscall.WNOHANG, nil)
		}
	}
}

type process struct {
	pid    int
	zombie bool
}

// adopted lists the children of this process but for the workers.
func adopted(workers map[int]bool) []process {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil
	}
	self := os.Getpid()
	var out []process
	for _, n := range names {
		pid, err := strconv.Atoi(n)
		if err != nil || workers[pid] {
			continue
		}
		if parent, zombie := parentOf(n); parent == self {
			out = append(out, process{pid, zombie})
		}
	}
	return out
}

// parentOf reads a process's parent and whether it is a zombie.
func parentOf(pid string) (parent int, zombie bool) {
	b, err := os.ReadFile("/proc/" + pid + "/stat")
	if err != nil {
		return 0, false
	}
	// The name is in parentheses and may have any; the state follows the last.
	i := bytes.LastIndexByte(b, ')')
	if i < 0 {
		return 0, false
	}
	f := bytes.Fields(b[i+1:])
	if len(f) < 2 {
		return 0, false
	}
	parent, _ = strconv.Atoi(string(f[1]))
	return parent, f[0][0] == 'Z'
}
