package device

import (
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
)

// A SyncDebug says what becomes of a call that makes the host wait for a
// stream; torch.cuda.set_sync_debug_mode.
type SyncDebug int32

// The modes. Any other value is SyncError.
const (
	SyncOff   SyncDebug = iota // nothing: it waits. torch's "default"
	SyncWarn                   // it is logged through log/slog, and waits
	SyncError                  // it fails with ErrSynchronizing and does not wait
)

// ErrSynchronizing is what a call returns, wrapped with its name, that would
// have made the host wait under SyncError.
var ErrSynchronizing = errors.New("called a synchronizing CUDA operation")

// SetSyncDebug finds calls that make the host wait where it should run ahead of
// its devices. It holds for all devices of the System and all goroutines until
// restore brings the mode back that was set before:
//
//	defer sys.SetSyncDebug(device.SyncError)()
//
// As in torch, Stream.Sync and the copies to and from ordinary host memory are
// found, before they enqueue anything; Device.Sync and Event.Sync, which say
// themselves that they wait, are not, nor is Query, which does not wait.
func (s *System) SetSyncDebug(mode SyncDebug) (restore func()) {
	before := s.syncDebug.Swap(int32(mode))
	return func() { s.syncDebug.Store(before) }
}

// SyncDebug returns the mode; torch.cuda.get_sync_debug_mode.
func (s *System) SyncDebug() SyncDebug { return SyncDebug(s.syncDebug.Load()) }

// Blocking is called before op makes the host wait for work of d. It costs one
// atomic load while the mode is SyncOff. For Chorus's own packages.
func (d *Device) Blocking(op string) error {
	mode := d.sys.SyncDebug()
	if mode == SyncOff {
		return nil
	}
	if mode == SyncWarn {
		slog.Warn(ErrSynchronizing.Error(), "operation", op, "device", d.String(), "caller", caller())
		return nil
	}
	return fmt.Errorf("%s on %s: %w, which SyncError forbids", op, d, ErrSynchronizing)
}

// caller returns the place in the program that called into Chorus.
func caller() string {
	pcs := make([]uintptr, 16)
	frames := runtime.CallersFrames(pcs[:runtime.Callers(3, pcs)])
	for {
		f, more := frames.Next()
		if !inRooms(f.Function) || !more {
			return fmt.Sprintf("%s:%d", f.File, f.Line)
		}
	}
}

// inRooms reports whether a function belongs to the packages that lead to
// Blocking.
func inRooms(function string) bool {
	name, ours := strings.CutPrefix(function, "github.com/gochorus/chorus/")
	room, _, _ := strings.Cut(name, ".")
	return ours && (room == "device" || room == "stream" || room == "memory")
}
