package memory

import (
	"crypto/rand"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/sameuser"
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
		stays := !v.closed && sameuser.Check(c) == nil
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

// remove makes the export impossible to open. v.mu is held.
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
