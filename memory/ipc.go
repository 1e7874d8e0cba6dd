package memory

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/internal/safe"
	"github.com/gochorus/chorus/stream"
)

// An IPCHandle identifies device memory for other processes of the same host and user.
// It is plain data that can be sent by any means, for example as JSON or gob. Only
// OpenIPC interprets its fields.
type IPCHandle struct {
	Device  string // UUID of the GPU
	DType   string // of the elements, as DType.String
	Bytes   int
	Offset  int    // bytes from the start of the mapped memory
	Segment []byte // CUipcMemHandle; empty if the memory is sent as file descriptors
	Event   []byte // CUipcEventHandle of the preceding operations; empty if they have completed
	PID     int    // of the process that owns the memory
	Socket  string // address of that process's server
	Export  uint64 // number of the memory at that server
	Token   []byte // secret that authorizes the opener
	//lint:ignore U1000 internal/inside finds the field by the method that it promotes
	ipcOption
}

//lint:ignore U1000 the field above is of this type
type ipcOption = handle.Ref[inside.IPCOption]

// IPCHandle returns a handle that OpenIPC of another process opens
// (torch.multiprocessing's reductions, cuIpcGetMemHandle). The operations that are
// already enqueued on x's stream come before the other process's operations. Work on
// other streams must have been ordered before that stream. On CUDA the host does not
// wait; with virtual devices it waits for the stream.
//
// The handle may be opened any number of times until x is closed. Close still returns
// at once, and the memory is freed when all processes that opened it have closed it or
// have ended. After Close the handle cannot be opened any more; use AwaitIPC to wait
// until the other processes have opened it. The other processes can read the whole
// segment of the allocator, so share memory only with processes that you trust.
//
// Memory of the backend cudaMallocAsync and memory that came from another process
// cannot be shared.
func (x Slice[T]) IPCHandle() (IPCHandle, error) { return ipcHandle(x.AsBytes(), DTypeOf[T]()) }

// ipcHandle and other functions without type parameters have the bodies of Slice's methods, because each package that
// uses all element types compiles the methods of all of them again.
func ipcHandle(x Slice[byte], t DType) (IPCHandle, error) {
	const op = "memory: ipc handle"
	if err := x.check(op); err != nil {
		return IPCHandle{}, err
	}
	if x.Bytes() == 0 {
		return IPCHandle{}, fmt.Errorf("%s: the slice is empty", op)
	}
	h, err := x.buf.share()
	if err != nil {
		return IPCHandle{}, fmt.Errorf("%s of %d bytes at %#x on %s: %w", op, x.Bytes(), x.Ptr(), x.Device(), err)
	}
	h.DType, h.Bytes = t.String(), x.Bytes()
	h.Offset += int(x.off)
	return h, nil
}

// AwaitIPC waits until handles of x's buffer have been opened n times in all.
// After it x can be closed without breaking processes that are about to open a
// handle. If ctx ends first, AwaitIPC returns the cause.
func (x Slice[T]) AwaitIPC(ctx context.Context, n int) error { return awaitIPC(ctx, x.AsBytes(), n) }

func awaitIPC(ctx context.Context, x Slice[byte], n int) error {
	const op = "memory: await ipc"
	if err := x.check(op); err != nil {
		return err
	}
	if x.buf == nil {
		return fmt.Errorf("%s: a slice without memory", op)
	}
	x.buf.mu.Lock()
	e := x.buf.export
	x.buf.mu.Unlock()
	if e == nil {
		return fmt.Errorf("%s: the memory has no handle: call IPCHandle before", op)
	}
	if err := e.await(ctx, n); err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	return nil
}

// OpenIPC maps the memory of a handle that another process has sent, and returns it as
// a slice for use on s, a stream of the same GPU
// (cuIpcOpenMemHandle). Operations that are enqueued on s from now on come after the
// operations that the other process had enqueued when it made the handle. Several
// handles into one segment share one mapping. The call talks to the other process and
// fails if that process does not answer within ten seconds.
//
// Close waits until s and the streams of RecordStream have completed their work,
// because unmapped memory must not be in use, and then returns the memory to the other
// process. If that process ends earlier, the memory stays readable until Close.
func OpenIPC[T Element](s *stream.Stream, h IPCHandle) (Slice[T], error) {
	const op = "memory: open ipc handle"
	if err := gpu.CheckStream(op, s, nil); err != nil {
		return Slice[T]{}, err
	}
	if err := gpu.StreamOf(s).RefuseCapture(op, "open it before the capture"); err != nil {
		return Slice[T]{}, err
	}
	if inside.OnPeer(&h) {
		h.Event = nil // events are of one GPU
		return openIPC[T](s, h, op)
	}
	uuid, err := gpu.DeviceOf(s.Device()).UUID()
	if err != nil {
		return Slice[T]{}, err
	}
	if h.Device != uuid {
		return Slice[T]{}, fmt.Errorf("%s: the memory is of the GPU %s, the stream of %s (%s): use a stream of that GPU", op, h.Device, s.Device(), uuid)
	}
	return openIPC[T](s, h, op)
}

// openIPC maps the memory of the handle for the device of s.
func openIPC[T Element](s *stream.Stream, h IPCHandle, op string) (Slice[T], error) {
	if want := DTypeOf[T]().String(); h.DType != want {
		return Slice[T]{}, fmt.Errorf("%s: its elements are %q, not %s", op, h.DType, want)
	}
	if err := h.check(sizeOf[T]()); err != nil {
		return Slice[T]{}, fmt.Errorf("%s: %w", op, err)
	}
	if !gpu.StreamOf(s).Retain() {
		return Slice[T]{}, gpu.CheckStream(op, s, nil)
	}
	b := newBuffer(s, h.Bytes)
	if err := ipcOf(s.Device()).openHandle(s, &h, b); err != nil {
		return Slice[T]{}, fmt.Errorf("%s of process %d: %w", op, h.PID, errors.Join(err, gpu.StreamOf(s).Release()))
	}
	handle.Init(b, &b.in().Owner, handle.About{Kind: "memory of another process", On: s.Device(), Bytes: h.Bytes})
	return Slice[T]{buf: b, n: h.Bytes / sizeOf[T](), root: true}, nil
}

// check validates a handle before Chorus contacts the other process.
func (h *IPCHandle) check(size int) error {
	switch {
	case h.Bytes <= 0 || h.Bytes%size != 0 || h.Offset < 0 || h.Socket == "" || len(h.Token) != tokenBytes:
		return errors.New("the handle is damaged")
	case len(h.Segment) != 0 && len(h.Segment) != 64 || len(h.Event) != 0 && len(h.Event) != 64:
		return errors.New("the handle is damaged")
	}
	return nil
}

// IPCCollect frees memory that this process has closed and that was shared with
// processes which have ended since (torch.cuda.ipc_collect). That also happens
// automatically, soon after a process ends; IPCCollect does it before it returns.
func IPCCollect(dev *device.Device) error {
	if dev == nil {
		return fmt.Errorf("memory: ipc collect: no device given")
	}
	if err := ipcOf(dev).collect(); err != nil {
		return fmt.Errorf("memory: ipc collect: %w", err)
	}
	return nil
}

// awaitUsers waits for the streams that used the buffer. It is needed for memory that
// cannot be freed in stream order. Adopted memory is released behind their work, which also
// needs the driver. b.mu is held.
func (b *Buffer) awaitUsers() error {
	const op = "memory: close"
	if b.adopted {
		if gpu.InCallback() {
			return fmt.Errorf("%s adopted memory: it needs the driver, which a callback must not use: close it outside: %w", op, device.ErrorNotPermitted)
		}
		return nil
	}
	if err := gpu.DeviceOf(b.Device()).Blocking(op); err != nil {
		return err
	}
	for _, s := range append([]*stream.Stream{b.in().Stream}, b.users...) {
		if err := syncBeside(s); err != nil && s.Device().Err() == nil { // a lost device no longer uses the memory
			return fmt.Errorf("%s: %w", op, err)
		}
	}
	return nil
}

// ipc is the state of a System for memory shared with other processes.
type ipc struct {
	timeout      time.Duration // timeout of a request
	closeTimeout time.Duration // timeout of a close request

	mu     sync.Mutex
	server *ipcServer          // set once this process has shared memory
	links  map[string]*ipcLink // to the processes whose memory is open here, by socket

	mapping  sync.Mutex            // held while mapping and unmapping
	mappings map[ipcKey]*ipcMapped // mapped memory of other processes
}

var ipcSystemKey handle.Key

func ipcOf(dev *device.Device) *ipc {
	return gpu.DeviceOf(dev).System().Local(&ipcSystemKey, func() any {
		return &ipc{timeout: ipcTimeout, closeTimeout: ipcCloseTimeout, links: map[string]*ipcLink{}, mappings: map[ipcKey]*ipcMapped{}}
	}).(*ipc)
}

// serve returns the server, which the first call starts.
func (x *ipc) serve() (*ipcServer, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.server == nil {
		v, err := newServer()
		if err != nil {
			return nil, err
		}
		x.server = v
	}
	return x.server, nil
}

func (x *ipc) collect() error {
	x.mu.Lock()
	v := x.server
	x.mu.Unlock()
	if v == nil {
		return nil
	}
	return v.collect()
}

// Close stops the server and the connections when the System is closed.
func (x *ipc) Close() error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.server != nil {
		x.server.close()
	}
	for _, l := range x.links {
		l.conn.Close()
	}
	return nil
}

// An ipcLink is the connection to a process whose memory is open here.
type ipcLink struct {
	name string
	uses int // guarded by ipc.mu

	mu     sync.Mutex // one request at a time
	conn   *net.UnixConn
	silent error // why the connection failed
	hasty  bool  // it failed in a request that had less time than others
}

// link returns a connection to the process for one opening, which ends with unlink.
func (x *ipc) link(name string) (*ipcLink, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.server != nil && x.server.name == name {
		return nil, fmt.Errorf("the memory is this process's own: use the slice that it has: %w", device.ErrorInvalidContext)
	}
	if l := x.links[name]; l != nil {
		l.uses++
		return l, nil
	}
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: name, Net: "unixpacket"})
	if err != nil {
		return nil, fmt.Errorf("that process is gone, or in another container: %w", err)
	}
	if err := safe.CheckUser(c); err != nil {
		c.Close()
		return nil, err
	}
	l := &ipcLink{name: name, uses: 1, conn: c}
	x.links[name] = l
	return l, nil
}

// unlink releases the connection of one opening; the last one closes it.
func (x *ipc) unlink(l *ipcLink) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if l.uses--; l.uses > 0 {
		return
	}
	l.conn.Close()
	if x.links[l.name] == l {
		delete(x.links, l.name)
	}
}

// ask sends a request and returns its answer, with files that the caller closes. After
// a connection error all further requests on the link fail; the link is closed by the
// last unlink.
func (x *ipc) ask(l *ipcLink, q *ipcRequest, timeout time.Duration) (a ipcAnswer, files []int, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.silent != nil {
		return a, nil, l.silent
	}
	err = l.conn.SetDeadline(time.Now().Add(timeout))
	if err == nil {
		err = sendPacket(l.conn, q, nil)
	}
	if err == nil {
		files, err = receivePacket(l.conn, &a)
	}
	if err != nil {
		x.mu.Lock()
		delete(x.links, l.name)
		x.mu.Unlock()
		l.silent, l.hasty = fmt.Errorf("that process does not answer: %w", err), timeout < x.timeout
		return a, nil, l.silent
	}
	if a.Error != "" {
		return a, nil, errors.New(a.Error)
	}
	return a, files, nil
}

// askToOpen asks the process of a handle to open its memory. It connects again if a request to close has
// failed on the connection meanwhile: the process may only have been too slow for that.
func (x *ipc) askToOpen(h *IPCHandle) (*ipcLink, ipcAnswer, error) {
	for {
		l, err := x.link(h.Socket)
		if err != nil {
			return nil, ipcAnswer{}, err
		}
		a, _, err := x.ask(l, &ipcRequest{Op: "open", Export: h.Export, Token: h.Token}, x.timeout)
		if err == nil {
			return l, a, nil
		}
		hasty := l.failedInHaste()
		x.unlink(l)
		if !hasty {
			return nil, ipcAnswer{}, err
		}
	}
}

// failedInHaste reports whether the connection failed in a request that had less time than others.
func (l *ipcLink) failedInHaste() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.hasty
}

// openHandle maps the memory of a handle and makes it b's memory.
func (x *ipc) openHandle(s *stream.Stream, h *IPCHandle, b *Buffer) error {
	l, a, err := x.askToOpen(h)
	if err != nil {
		return err
	}
	leave := func() {
		// If the process has ended, its server state is gone. If the process is
		// stopped, it reads this request when it continues.
		_, _, _ = x.ask(l, &ipcRequest{Op: "close", Export: h.Export}, x.closeTimeout)
		x.unlink(l)
	}
	if !a.fits(h) {
		leave()
		return errors.New("the handle is damaged: it reaches beyond the memory that is shared")
	}
	m, err := x.mapHandle(s.Device(), l, h, &a)
	if err != nil {
		leave()
		return err
	}
	if err := follow(s, h); err != nil {
		err = errors.Join(err, x.exit(m))
		leave()
		return err
	}
	b.ptr, b.imported = m.base+cudadrv.DevicePtr(h.Offset), true
	b.foreign = func() error {
		err := x.exit(m)
		leave()
		return err
	}
	return nil
}

// follow orders s after the operations that precede the handle.
func follow(s *stream.Stream, h *IPCHandle) error {
	if len(h.Event) == 0 {
		return nil
	}
	e, err := stream.OpenEvent(s.Device(), stream.EventHandle(h.Event))
	if err != nil {
		return err
	}
	return errors.Join(s.Wait(e), e.Close())
}

// An ipcKey identifies mapped memory: a segment by its handle, or the pages of one
// export.
type ipcKey struct {
	dev     *device.Device
	segment cudadrv.IpcMemHandle
	socket  string
	export  uint64
}

// An ipcMapped is a mapping of another process's memory.
type ipcMapped struct {
	key   ipcKey
	base  cudadrv.DevicePtr
	bytes uintptr
	pages bool // the bytes are mapped pages, not a segment
	uses  int
}

// mapHandle maps the memory of a handle, or shares the mapping of an earlier
// opening of the same memory.
func (x *ipc) mapHandle(dev *device.Device, l *ipcLink, h *IPCHandle, a *ipcAnswer) (*ipcMapped, error) {
	key := ipcKey{dev: dev}
	if a.Pages == 0 {
		key.segment = cudadrv.IpcMemHandle(h.Segment)
	} else {
		key.socket, key.export = h.Socket, h.Export
	}
	x.mapping.Lock()
	defer x.mapping.Unlock()
	m := x.mappings[key]
	if m == nil {
		m = &ipcMapped{key: key, pages: a.Pages > 0}
		if err := m.mapMemory(x, l, a); err != nil {
			return nil, err
		}
	}
	if uintptr(a.High) > m.bytes {
		err := fmt.Errorf("it sent an invalid answer: the memory would have at least %d bytes, and has %d", a.High, m.bytes)
		if m.uses == 0 {
			err = errors.Join(err, m.close())
		}
		return nil, err
	}
	m.uses++
	x.mappings[key] = m
	return m, nil
}

func (m *ipcMapped) mapMemory(x *ipc, l *ipcLink, a *ipcAnswer) error {
	if m.pages {
		return m.openPages(x, l, a)
	}
	return m.openSegment()
}

// close unmaps the memory.
func (m *ipcMapped) close() error {
	if m.pages {
		return m.unmap(m.bytes)
	}
	return gpu.DeviceOf(m.key.dev).DoInTime(func(drv cudadrv.Driver) cudadrv.Result { return drv.IpcCloseMemHandle(m.base) })
}

// exit undoes enter for memory whose operations have all completed, and removes
// the mapping after its last use.
func (x *ipc) exit(m *ipcMapped) error {
	x.mapping.Lock()
	defer x.mapping.Unlock()
	if m.uses--; m.uses > 0 {
		return nil
	}
	delete(x.mappings, m.key)
	return m.close()
}

func (m *ipcMapped) openSegment() error {
	err := gpu.DeviceOf(m.key.dev).DoInTime(func(drv cudadrv.Driver) (r cudadrv.Result) {
		m.base, r = drv.IpcOpenMemHandle(m.key.segment, cudadrv.IpcMemLazyEnablePeerAccess)
		return r
	})
	if err != nil {
		return err
	}
	err = gpu.DeviceOf(m.key.dev).DoInTime(func(drv cudadrv.Driver) (r cudadrv.Result) {
		_, m.bytes, r = drv.MemGetAddressRange(m.base)
		return r
	})
	if err != nil {
		return errors.Join(err, m.close())
	}
	return nil
}

// openPages maps the pages at consecutive addresses.
func (m *ipcMapped) openPages(x *ipc, l *ipcLink, a *ipcAnswer) error {
	dev := m.key.dev
	m.bytes = uintptr(a.PageBytes) * uintptr(a.Pages)
	err := gpu.DeviceOf(dev).DoInTime(func(drv cudadrv.Driver) (r cudadrv.Result) {
		m.base, r = drv.MemAddressReserve(m.bytes, 0, 0)
		return r
	})
	if err != nil {
		return err
	}
	done, err := m.askPages(x, l, a)
	if err == nil {
		err = gpu.DeviceOf(dev).DoInTime(func(drv cudadrv.Driver) cudadrv.Result {
			return drv.MemSetAccess(m.base, m.bytes, cudadrv.MemAccessReadWrite, gpu.DeviceOf(dev).Handle())
		})
	}
	if err != nil {
		return errors.Join(err, m.unmap(done))
	}
	return nil
}

// askPages asks the other process for the pages, which it sends as files, maps
// them, and returns the number of mapped bytes.
func (m *ipcMapped) askPages(x *ipc, l *ipcLink, a *ipcAnswer) (done uintptr, err error) {
	page := uintptr(a.PageBytes)
	for n := 0; n < a.Pages && err == nil; {
		var files []int
		if _, files, err = x.ask(l, &ipcRequest{Op: "pages", Export: m.key.export, From: n}, x.timeout); err != nil {
			break
		}
		if len(files) == 0 || len(files) > a.Pages-n {
			err = fmt.Errorf("it sent %d pages of %d", len(files), a.Pages-n)
		}
		for i := 0; i < len(files) && err == nil; i++ {
			if err = m.mapPage(done, page, files[i]); err == nil {
				done += page
			}
		}
		closeFiles(files)
		n += len(files)
	}
	return done, err
}

// mapPage maps one page and releases its handle, because the mapping alone
// keeps the physical memory alive.
func (m *ipcMapped) mapPage(at, bytes uintptr, file int) error {
	dev := m.key.dev
	var h cudadrv.MemHandle
	err := gpu.DeviceOf(dev).DoInTime(func(drv cudadrv.Driver) (r cudadrv.Result) {
		h, r = drv.MemImportFromShareableHandle(int32(file), cudadrv.MemHandlePosixFD)
		return r
	})
	if err != nil {
		return err
	}
	err = gpu.DeviceOf(dev).DoInTime(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemMap(m.base+cudadrv.DevicePtr(at), bytes, 0, h)
	})
	return errors.Join(err, gpu.DeviceOf(dev).DoInTime(func(drv cudadrv.Driver) cudadrv.Result { return drv.MemRelease(h) }))
}

// unmap unmaps the first bytes and frees the address range.
func (m *ipcMapped) unmap(bytes uintptr) error {
	dev := m.key.dev
	var err error
	if bytes > 0 {
		err = gpu.DeviceOf(dev).DoInTime(func(drv cudadrv.Driver) cudadrv.Result { return drv.MemUnmap(m.base, bytes) })
	}
	if err != nil {
		return err
	}
	return gpu.DeviceOf(dev).DoInTime(func(drv cudadrv.Driver) cudadrv.Result { return drv.MemAddressFree(m.base, m.bytes) })
}
