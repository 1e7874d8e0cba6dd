package memory

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/safe"
	"github.com/gochorus/chorus/stream"
)

// An ipcServer serves processes that have handles of a System's memory.
type ipcServer struct {
	name     string // of the socket
	listener *net.UnixListener

	mu      sync.Mutex
	last    uint64
	exports map[uint64]*ipcExport
	peers   map[*ipcPeer]bool
	late    []*ipcExport // could not be freed because a stream was captured
	freeing int          // exports that are being freed
	freed   *sync.Cond   // freeing has decreased
	closed  bool
}

const acceptAgain = 10 * time.Millisecond

// An ipcPeer is one connection, with the exports that were opened through it.
type ipcPeer struct {
	conn *net.UnixConn
	open map[*ipcExport]int // number of openings
}

// newServer listens on an abstract socket with an unguessable name. The socket is not a
// file, so it disappears with the process.
func newServer() (*ipcServer, error) {
	secret := make([]byte, tokenBytes)
	_, _ = rand.Read(secret) // crypto/rand.Read never fails
	v := &ipcServer{name: "@chorus-ipc-" + hex.EncodeToString(secret), exports: map[uint64]*ipcExport{}, peers: map[*ipcPeer]bool{}}
	v.freed = sync.NewCond(&v.mu)
	var err error
	if v.listener, err = net.ListenUnix("unixpacket", &net.UnixAddr{Name: v.name, Net: "unixpacket"}); err != nil {
		return nil, fmt.Errorf("a socket for other processes: %w", err)
	}
	go v.accept()
	return v, nil
}

func (v *ipcServer) accept() {
	for {
		c, err := v.listener.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // too many open files: try again later
			time.Sleep(acceptAgain)
			continue
		}
		p := &ipcPeer{conn: c, open: map[*ipcExport]int{}}
		v.mu.Lock()
		stays := !v.closed && safe.CheckUser(c) == nil
		if stays {
			v.peers[p] = true
		}
		v.mu.Unlock()
		if !stays {
			c.Close()
			continue
		}
		go v.talk(p)
	}
}

// talk serves one process until the connection ends.
func (v *ipcServer) talk(p *ipcPeer) {
	defer v.drop(p)
	for {
		var q ipcRequest
		files, err := receivePacket(p.conn, &q)
		closeFiles(files)
		if err != nil || v.answer(p, &q) != nil {
			return
		}
	}
}

func (v *ipcServer) answer(p *ipcPeer, q *ipcRequest) error {
	switch q.Op {
	case "open":
		return sendPacket(p.conn, v.openExport(p, q), nil)
	case "pages":
		a, files := v.pages(p, q)
		defer closeFiles(files)
		return sendPacket(p.conn, a, files)
	case "close":
		v.closeExport(p, q.Export)
		return sendPacket(p.conn, ipcAnswer{}, nil)
	}
	return sendPacket(p.conn, ipcAnswer{Error: fmt.Sprintf("there is no request %q", q.Op)}, nil)
}

func (v *ipcServer) openExport(p *ipcPeer, q *ipcRequest) ipcAnswer {
	v.mu.Lock()
	defer v.mu.Unlock()
	e := v.exports[q.Export]
	switch {
	case e == nil || !v.peers[p]:
		return ipcAnswer{Error: "it has closed the memory: it must stay open until the handle was opened"}
	case subtle.ConstantTimeCompare(e.token, q.Token) != 1:
		return ipcAnswer{Error: "the handle is not one of its handles"}
	}
	p.open[e]++
	e.receivers++
	e.opened++
	close(e.changed)
	e.changed = make(chan struct{})
	return ipcAnswer{Low: e.low, High: e.low + int(e.buf.bytes), Pages: len(e.pages), PageBytes: e.page}
}

// pages returns file descriptors of some pages of an export that the process has
// opened.
func (v *ipcServer) pages(p *ipcPeer, q *ipcRequest) (ipcAnswer, []int) {
	v.mu.Lock()
	e := v.exports[q.Export]
	has := e != nil && p.open[e] > 0
	v.mu.Unlock()
	if !has || q.From < 0 || q.From >= len(e.pages) {
		return ipcAnswer{Error: "the memory was not opened before"}, nil
	}
	var files []int
	for _, h := range e.pages[q.From:min(q.From+ipcFiles, len(e.pages))] {
		var fd int32
		err := gpu.DeviceOf(e.buf.Device()).DoInTime(func(drv cudadrv.Driver) (r cudadrv.Result) {
			fd, r = drv.MemExportToShareableHandle(h, cudadrv.MemHandlePosixFD)
			return r
		})
		if err != nil {
			closeFiles(files)
			return ipcAnswer{Error: err.Error()}, nil
		}
		files = append(files, int(fd))
	}
	return ipcAnswer{}, files
}

// closeExport ends one opening.
func (v *ipcServer) closeExport(p *ipcPeer, id uint64) {
	v.mu.Lock()
	e := v.exports[id]
	over := e != nil && p.open[e] > 0 && v.undo(p, e)
	v.mu.Unlock()
	if over {
		_ = v.finish(e) // this process has no caller to report to; a lost device was already reported
	}
}

// drop ends all openings of a process.
func (v *ipcServer) drop(p *ipcPeer) {
	p.conn.Close()
	var list []*ipcExport
	v.mu.Lock()
	delete(v.peers, p)
	for e := range p.open {
		over := false
		for p.open[e] > 0 {
			over = v.undo(p, e)
		}
		if over {
			list = append(list, e)
		}
	}
	v.mu.Unlock()
	for _, e := range list {
		_ = v.finish(e) // as above
	}
}

// undo ends one opening. It reports whether that was the last use of the memory; the
// caller must then call finish. v.mu is held.
func (v *ipcServer) undo(p *ipcPeer, e *ipcExport) bool {
	if p.open[e]--; p.open[e] == 0 {
		delete(p.open, e)
	}
	e.receivers--
	if e.receivers > 0 || !e.closed {
		return false
	}
	v.remove(e)
	v.freeing++
	return true
}

// finish frees the memory, or postpones that if a stream is captured.
func (v *ipcServer) finish(e *ipcExport) error {
	done, err := e.finish()
	v.mu.Lock()
	defer v.mu.Unlock()
	if !done {
		v.late = append(v.late, e)
	}
	v.freeing--
	v.freed.Broadcast()
	return err
}

// add assigns the export its number.
func (v *ipcServer) add(e *ipcExport) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.last++
	e.id = v.last
	v.exports[e.id] = e
}

// remove removes the export, so that no process can open it. v.mu is held.
func (v *ipcServer) remove(e *ipcExport) { delete(v.exports, e.id) }

// collect drops the processes that have ended and frees the postponed exports.
func (v *ipcServer) collect() error {
	v.mu.Lock()
	var gone []*ipcPeer
	for p := range v.peers {
		if hungUp(p.conn) {
			gone = append(gone, p)
		}
	}
	late := v.late
	v.late = nil
	v.freeing += len(late)
	v.mu.Unlock()
	for _, p := range gone {
		v.drop(p)
	}
	var errs []error
	for _, e := range late {
		errs = append(errs, v.finish(e))
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	for v.freeing > 0 {
		v.freed.Wait()
	}
	return errors.Join(errs...)
}

// close stops the server when its System is closed. Memory that other processes have
// opened is freed with the contexts.
func (v *ipcServer) close() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.closed = true
	v.listener.Close()
	for p := range v.peers {
		p.open = map[*ipcExport]int{}
		p.conn.Close()
	}
}

// An ipcExport is the state of a buffer that has IPC handles.
type ipcExport struct {
	server *ipcServer
	id     uint64
	token  []byte
	buf    *Buffer

	low     int                  // offset of the buffer in the mapped memory
	segment cudadrv.IpcMemHandle // of plain memory
	pages   []cudadrv.MemHandle  // of mapped memory
	page    int                  // size of each in bytes
	event   *stream.Event        // after the preceding operations; nil if the host waits for them

	// server.mu guards these.
	receivers int  // open openings
	opened    int  // openings in total
	closed    bool // by the owner, while receivers > 0
	changed   chan struct{}
}

// share returns a handle for the whole buffer. The operations that are already enqueued
// on its stream come before the receivers' operations.
func (b *Buffer) share() (IPCHandle, error) {
	if err := gpu.StreamOf(b.in().Stream).RefuseCapture("share", "make the handle before the capture"); err != nil {
		return IPCHandle{}, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.in().Owner.Closed() {
		return IPCHandle{}, device.ErrClosed
	}
	if b.export == nil {
		e, err := newExport(b)
		if err != nil {
			return IPCHandle{}, err
		}
		b.export = e
	}
	return b.export.handle()
}

// newExport determines how the buffer's memory is shared. b.mu is held.
func newExport(b *Buffer) (*ipcExport, error) {
	if b.imported {
		return nil, errors.New("the memory belongs to another process: ask that for a handle")
	}
	e := &ipcExport{buf: b, token: make([]byte, tokenBytes), changed: make(chan struct{})}
	_, _ = rand.Read(e.token) // crypto/rand.Read never fails
	if err := e.find(); err != nil {
		return nil, err
	}
	if gpu.DeviceOf(b.Device()).System().Machine == nil { // virtual events cannot be shared with another process
		var err error
		if e.event, err = stream.NewEvent(b.Device(), &stream.EventConfig{Interprocess: true}); err != nil {
			return nil, err
		}
	}
	server, err := ipcOf(b.Device()).serve()
	if err == nil {
		e.server = server
		server.add(e)
		return e, nil
	}
	return nil, errors.Join(err, e.event.Close())
}

// find finds the segment, or the pages, that the buffer lies in.
func (e *ipcExport) find() error {
	b := e.buf
	if base, page, handles := pagesOf(b.Device()).find(uint64(b.ptr), uint64(b.bytes)); len(handles) > 0 {
		e.low, e.page, e.pages = int(uint64(b.ptr)-base), int(page), handles
		return nil
	}
	var base cudadrv.DevicePtr
	err := gpu.DeviceOf(b.Device()).Do(func(drv cudadrv.Driver) (r cudadrv.Result) {
		base, _, r = drv.MemGetAddressRange(b.ptr)
		return r
	})
	if err == nil {
		err = gpu.DeviceOf(b.Device()).Do(func(drv cudadrv.Driver) (r cudadrv.Result) {
			e.segment, r = drv.IpcGetMemHandle(b.ptr)
			return r
		})
	}
	if errors.Is(err, device.ErrorInvalidValue) {
		return fmt.Errorf("the memory is not of a kind that processes share, as that of backend:cudaMallocAsync is not: %w", err)
	}
	e.low = int(b.ptr - base)
	return err
}

// handle records the preceding operations and returns the handle.
func (e *ipcExport) handle() (IPCHandle, error) {
	b := e.buf
	uuid, err := gpu.DeviceOf(b.Device()).UUID()
	if err != nil {
		return IPCHandle{}, err
	}
	h := IPCHandle{Device: uuid, Offset: e.low, PID: os.Getpid(), Socket: e.server.name, Export: e.id, Token: e.token}
	if len(e.pages) == 0 {
		h.Segment = e.segment[:]
	}
	if e.event == nil {
		if err := gpu.DeviceOf(b.Device()).Blocking("memory: ipc handle"); err != nil {
			return IPCHandle{}, err
		}
		return h, syncBeside(b.in().Stream)
	}
	event, err := e.event.IPCHandle()
	if err == nil {
		err = gpu.DeviceOf(b.Device()).RecordEvent(gpu.EventOf(e.event), gpu.StreamOf(b.in().Stream).Raw())
	}
	h.Event = event[:]
	return h, err
}

// keep records that the owner has closed the buffer, and reports whether the memory
// must stay for the receivers. Buffer.mu is held.
func (e *ipcExport) keep() bool {
	if e == nil {
		return false
	}
	e.server.mu.Lock()
	defer e.server.mu.Unlock()
	if e.receivers > 0 {
		e.closed = true
		return true
	}
	e.server.remove(e)
	_ = e.event.Close() // an event that cannot be destroyed does no harm
	return false
}

// await waits until there were n openings.
func (e *ipcExport) await(ctx context.Context, n int) error {
	for {
		e.server.mu.Lock()
		opened, changed := e.opened, e.changed
		e.server.mu.Unlock()
		if opened >= n {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("opened %d times, not %d: %w", opened, n, context.Cause(ctx))
		}
	}
}

// finish frees memory that the owner has closed, after the last receiver. It fails
// while a stream that used the memory is captured.
func (e *ipcExport) finish() (done bool, err error) {
	b := e.buf
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.refuseCapture(); err != nil {
		return false, err
	}
	if b.keep() {
		return true, e.event.Close()
	}
	return true, errors.Join(b.giveBack(), e.event.Close())
}

// mappedPages has the physical memory that is mapped at each address of a device, in
// pages of one size. The code that maps and unmaps pages reports to it, so that
// IPCHandle can export the pages. They are created with cudadrv.MemHandlePosixFD.
type mappedPages struct {
	mu    sync.RWMutex
	bytes uint64 // of a page
	at    map[uint64]cudadrv.MemHandle
}

var pagesKey handle.Key

func pagesOf(d *device.Device) *mappedPages {
	return gpu.DeviceOf(d).Local(&pagesKey, func() any { return &mappedPages{at: map[uint64]cudadrv.MemHandle{}} }).(*mappedPages)
}

// mapped records a page of the given size at its address.
func (m *mappedPages) mapped(addr, bytes uint64, h cudadrv.MemHandle) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.bytes = bytes
	m.at[addr] = h
}

// unmapped removes the pages of a range.
func (m *mappedPages) unmapped(addr, bytes uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.bytes == 0 {
		return
	}
	for at := addr; at-addr < bytes; at += m.bytes {
		delete(m.at, at)
	}
}

// addresses returns the addresses of all pages.
func (m *mappedPages) addresses() []uint64 {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return slices.Collect(maps.Keys(m.at))
}

// find returns the consecutive pages that contain a range of addresses, and the address
// of the first page. It returns none if the range is plain memory.
func (m *mappedPages) find(addr, bytes uint64) (first, page uint64, handles []cudadrv.MemHandle) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if m.bytes == 0 || bytes == 0 {
		return 0, 0, nil
	}
	first = addr &^ (m.bytes - 1)
	for at := first; at < addr+bytes; at += m.bytes {
		h, ok := m.at[at]
		if !ok {
			return 0, 0, nil
		}
		handles = append(handles, h)
	}
	return first, m.bytes, handles
}

// Processes that share memory talk over a packet socket: one request, one answer. The
// owner of the memory identifies the other process by its connection. When the
// connection ends, all openings of that process end.

const (
	tokenBytes      = 16
	ipcTimeout      = 10 * time.Second
	ipcCloseTimeout = time.Second
	// ipcPacket is the size of the packet buffer; every packet fits.
	ipcPacket = 4096
	// ipcFiles is the number of file descriptors in a packet; the system's limit is
	// 253.
	ipcFiles = 128
)

// An ipcRequest is a request of a process that opens memory.
type ipcRequest struct {
	Op     string // "open", "pages" or "close"
	Export uint64
	Token  []byte `json:",omitempty"` // for "open"
	From   int    `json:",omitempty"` // for "pages": the first wanted page
}

// An ipcAnswer is the answer to an ipcRequest. The answer to "pages" also carries
// files.
type ipcAnswer struct {
	Error string `json:",omitempty"`
	// Low and High are the bounds of the shared memory within the mapped memory.
	Low, High int `json:",omitempty"`
	// Pages and PageBytes describe memory that is sent as file descriptors.
	Pages     int `json:",omitempty"`
	PageBytes int `json:",omitempty"`
}

// fits reports whether the memory of the answer contains the memory of the
// handle. Another process has written both, so neither can be trusted.
func (a *ipcAnswer) fits(h *IPCHandle) bool {
	switch {
	case a.Low < 0 || a.Pages < 0 || (a.Pages > 0) != (len(h.Segment) == 0):
		return false
	case a.Pages > 0 && (a.PageBytes <= 0 || a.Pages > math.MaxInt/a.PageBytes || a.High > a.Pages*a.PageBytes):
		return false
	}
	return a.Low <= h.Offset && h.Offset <= a.High && h.Bytes >= 0 && h.Bytes <= a.High-h.Offset
}

func sendPacket(c *net.UnixConn, v any, files []int) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	var rights []byte
	if len(files) > 0 {
		rights = unix.UnixRights(files...)
	}
	_, _, err = c.WriteMsgUnix(text, rights, nil)
	return err
}

// receivePacket also returns the files, which the caller closes.
func receivePacket(c *net.UnixConn, v any) (files []int, err error) {
	text, rights := make([]byte, ipcPacket), make([]byte, unix.CmsgSpace(4*ipcFiles))
	n, m, flags, _, err := c.ReadMsgUnix(text, rights)
	if err != nil {
		return nil, err
	}
	if m > 0 {
		if files, err = filesIn(rights[:m]); err != nil {
			return nil, err
		}
	}
	switch {
	case n == 0:
		err = io.EOF
	case flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0:
		err = errors.New("a packet was cut off")
	default:
		err = json.Unmarshal(text[:n], v)
		safe.Record(v)
	}
	if err != nil {
		closeFiles(files)
		return nil, err
	}
	return files, nil
}

func filesIn(rights []byte) (files []int, err error) {
	list, err := unix.ParseSocketControlMessage(rights)
	for i := range list {
		got, e := unix.ParseUnixRights(&list[i])
		files, err = append(files, got...), errors.Join(err, e)
	}
	if err != nil {
		closeFiles(files)
		return nil, err
	}
	return files, nil
}

func closeFiles(files []int) {
	for _, f := range files {
		_ = unix.Close(f)
	}
}

// hungUp reports whether the other process has closed the connection.
func hungUp(c *net.UnixConn) bool {
	gone := false
	err := control(c, func(fd int) error {
		list := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		n, err := unix.Poll(list, 0)
		for err == unix.EINTR { // a signal of Go's scheduler interrupted the call
			n, err = unix.Poll(list, 0)
		}
		gone = n > 0 && list[0].Revents&(unix.POLLRDHUP|unix.POLLHUP|unix.POLLERR) != 0
		return err
	})
	return gone || err != nil
}

func control(c syscall.Conn, fn func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	if err := raw.Control(func(fd uintptr) { inner = fn(int(fd)) }); err != nil {
		return err
	}
	return inner
}
