package main

import (
	"maps"
	"slices"
	"syscall"
	"time"
)

// faultsOfHosts are the faults of a soak on several hosts. A fault of a host begins when all hosts take part, so that
// the others are a majority.
var faultsOfHosts = map[string]func(*soak){
	"kill a worker":         (*soak).killWorker,
	"kill two workers":      func(s *soak) { s.killWorker(); s.killWorker() },
	"stop a worker":         (*soak).stopWorker,
	"kill a launcher":       func(s *soak) { s.signal(s.anyHost(), syscall.SIGKILL) },
	"kill the coordinator":  func(s *soak) { s.signal(s.coordinator(), syscall.SIGKILL) },
	"drain a host":          func(s *soak) { s.signal(s.anyHost(), syscall.SIGTERM) },
	"drain the coordinator": func(s *soak) { s.signal(s.coordinator(), syscall.SIGTERM) },
	"stop a launcher":       func(s *soak) { s.stopHost(s.anyHost()) },
	"stop the coordinator":  func(s *soak) { s.stopHost(s.coordinator()) },
	"cut a host off":        func(s *soak) { s.cut(s.anyHost()) },
	"lose packets":          (*soak).losePackets,
	"slow a host down":      (*soak).slowDown,
}

func (s *soak) anyHost() *soakHost { return s.hosts[s.rnd.IntN(len(s.hosts))] }

// coordinator returns the host that has said last that it coordinates; at the start the first seed.
func (s *soak) coordinator() *soakHost { return s.hosts[s.leader] }

// anyWorker returns the pid of a member of the epoch, or 0.
func (s *soak) anyWorker() int {
	var pids []int
	for _, host := range slices.Sorted(maps.Keys(s.members)) {
		pids = append(pids, slices.Sorted(maps.Values(s.members[host]))...)
	}
	if len(pids) == 0 {
		return 0
	}
	return pids[s.rnd.IntN(len(pids))]
}

func (s *soak) killWorker() {
	if pid := s.anyWorker(); pid > 0 {
		_ = syscall.Kill(pid, syscall.SIGKILL) // it may have ended
	}
}

// pause lasts for less or more than the time after which a silent process is lost.
func (s *soak) pause() { s.pauseFor(time.Duration(s.rnd.Int64N(int64(6 * time.Second)))) }

func (s *soak) pauseFor(d time.Duration) {
	end := time.Now().Add(d)
	s.watch(func() bool { return time.Now().After(end) })
}

func (s *soak) stopWorker() {
	pid := s.anyWorker()
	if pid == 0 || syscall.Kill(pid, syscall.SIGSTOP) != nil {
		return
	}
	s.pause()
	_ = syscall.Kill(pid, syscall.SIGCONT) // its launcher may have killed it
}

// signal sends a signal to a launcher.
func (s *soak) signal(h *soakHost, sig syscall.Signal) {
	h.harmed = sig.String()
	_ = h.cmd.Process.Signal(sig) // it may have ended
}

func (s *soak) stopHost(h *soakHost) {
	s.signal(h, syscall.SIGSTOP)
	s.pause()
	s.signal(h, syscall.SIGCONT)
}

// cut cuts a host off from the others.
func (s *soak) cut(h *soakHost) {
	if s.lan == nil {
		return
	}
	h.harmed = "cut"
	s.lan.Cut(h.number)
	s.pause()
	s.lan.Heal(h.number)
}

// losePackets cuts a host off for a moment, several times.
func (s *soak) losePackets() {
	if s.lan == nil {
		return
	}
	h := s.anyHost()
	for range 10 {
		s.lan.Cut(h.number)
		s.lan.Heal(h.number)
		s.pauseFor(time.Duration(s.rnd.Int64N(int64(300 * time.Millisecond))))
	}
}

// slowDown lets a host receive a megabit a second, which delays its packets.
func (s *soak) slowDown() {
	if s.lan == nil {
		return
	}
	h := s.anyHost()
	h.harmed = "slow"
	s.lan.Do("tc qdisc add dev %s root tbf rate 1mbit burst 3200 limit 30000", s.lan.Port(h.number))
	s.pause()
	s.lan.Do("tc qdisc del dev %s root", s.lan.Port(h.number))
}
