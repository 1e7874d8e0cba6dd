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
	// Every kernel that Go supports has it.
	_, _, _ = syscall.RawSyscall(syscall.SYS_PRCTL, prSetChildSubreaper, 1, 0)
}

// killLeftovers kills what the workers have left behind, in their process groups
// and out of them: all of it has become this process's child, or will when its
// parent is gone.
func killLeftovers(spare map[int]bool) {
	for range 100 {
		left := adopted(spare)
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

// collectZombies collects adopted processes that have ended. The ends of spare,
// such as the workers, are awaited elsewhere and must not be taken from there.
func collectZombies(spare map[int]bool) {
	for _, p := range adopted(spare) {
		if p.zombie {
			_, _ = syscall.Wait4(p.pid, nil, syscall.WNOHANG, nil)
		}
	}
}

type process struct {
	pid    int
	zombie bool
}

// adopted lists the children of this process but for spare.
func adopted(spare map[int]bool) []process {
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
		if err != nil || spare[pid] {
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
	return parseStat(b)
}

// parseStat reads the text of /proc/<pid>/stat. The name in it is in parentheses and may
// have any; the state follows the last.
func parseStat(b []byte) (parent int, zombie bool) {
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
