package device

import "github.com/gochorus/chorus/internal/gpu"

// A SyncDebug says how to handle a call that makes the host wait for a stream;
// torch.cuda.set_sync_debug_mode.
type SyncDebug int32

// The modes. Any other value is SyncError.
const (
	SyncOff   = SyncDebug(gpu.SyncOff)   // the call waits; torch's "default"
	SyncWarn  = SyncDebug(gpu.SyncWarn)  // the call is logged through log/slog, and waits
	SyncError = SyncDebug(gpu.SyncError) // the call fails with ErrSynchronizing and does not wait
)

// ErrSynchronizing is the error of calls that would make the host wait under SyncError. It
// is wrapped with the name of the call.
var ErrSynchronizing = gpu.ErrSynchronizing

// SetSyncDebug detects calls that make the host wait although it should run ahead of its
// devices. It applies to all devices of the System and all goroutines until restore is
// called, which restores the previous mode:
//
//	defer sys.SetSyncDebug(device.SyncError)()
//
// As in torch, Stream.Sync and the copies to and from ordinary host memory are detected
// before they enqueue anything. Device.Sync and Event.Sync, whose purpose is to wait, are
// not detected, nor is Query, which does not wait.
func (s *System) SetSyncDebug(mode SyncDebug) (restore func()) {
	before := gpu.SystemOf(s).SetSyncDebug(int32(mode))
	return func() { gpu.SystemOf(s).SetSyncDebug(before) }
}

// SyncDebug returns the mode; torch.cuda.get_sync_debug_mode.
func (s *System) SyncDebug() SyncDebug { return SyncDebug(gpu.SystemOf(s).SyncDebug()) }
