package gpu

import (
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
)

// The modes of SetSyncDebug. Any other value is SyncError.
const (
	SyncOff int32 = iota
	SyncWarn
	SyncError
)

// ErrSynchronizing is returned, wrapped with the name of the call, by a call that would
// make the host wait in the mode SyncError.
var ErrSynchronizing = errors.New("called a synchronizing CUDA operation")

// SetSyncDebug sets the mode of Blocking, and returns the previous mode.
func (s *System) SetSyncDebug(mode int32) (before int32) { return s.syncDebug.Swap(mode) }

// SyncDebug returns the mode of SetSyncDebug.
func (s *System) SyncDebug() int32 { return s.syncDebug.Load() }

// Blocking is called before op makes the host wait for work of d. It costs one
// atomic load while the mode is SyncOff.
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
		if !leadsToBlocking(f.Function) || !more {
			return fmt.Sprintf("%s:%d", f.File, f.Line)
		}
	}
}

// leadsToBlocking reports whether a function belongs to the packages that call Blocking.
func leadsToBlocking(function string) bool {
	name, ours := strings.CutPrefix(function, "github.com/gochorus/chorus/")
	room, _, _ := strings.Cut(name, ".")
	return ours && (room == "internal/gpu" || room == "stream" || room == "memory")
}
