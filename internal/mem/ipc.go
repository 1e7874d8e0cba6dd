package mem

// An IPCOption is an option of IPC handles that users do not set. The public handle
// embeds it.
type IPCOption struct{ peer bool }

func (o *IPCOption) ipc() *IPCOption { return o }

// HasIPCOption is implemented by the public handle that embeds an IPCOption.
type HasIPCOption interface{ ipc() *IPCOption }

// OpenOnPeer lets the handle be opened on a stream of any GPU that reaches the memory.
// Opening it makes no context on the GPU that has the memory, and the stream waits for
// nothing: the other process has waited for the work that wrote the memory.
func OpenOnPeer(x HasIPCOption) { x.ipc().peer = true }

// OnPeer reports whether OpenOnPeer was called for the handle.
func OnPeer(x HasIPCOption) bool { return x.ipc().peer }
