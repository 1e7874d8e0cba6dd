package memory

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/kept"
	"github.com/gochorus/chorus/internal/sameuser"
	"github.com/gochorus/chorus/stream"
)

// ipc is the state of a System for memory shared with other processes.
type ipc struct {
	patience time.Duration // timeout of a request
	farewell time.Duration // timeout of a close request

	mu     sync.Mutex
	server *ipcServer          // set once this process has shared memory
	links  map[string]*ipcLink // to the processes whose memory is open here, by socket

	mapping  sync.Mutex            // held while mapping and unmapping
	mappings map[ipcKey]*ipcMapped // mapped memory of other processes
}

var ipcSystemKey kept.Key

func ipcOf(dev *device.Device) *ipc {
	return gpu.DeviceOf(dev).System().Local(&ipcSystemKey, func() any {
		return &ipc{patience: ipcPatience, farewell: ipcFarewell, links: map[string]*ipcLink{}, mappings: map[ipcKey]*ipcMapped{}}
	}).(*ipc)
}

// serve returns the server. The first call starts it.
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
	if err := sameuser.Check(c); err != nil {
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
func (x *ipc) ask(l *ipcLink, q *ipcRequest, patience time.Duration) (a ipcAnswer, files []int, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.silent != nil {
		return a, nil, l.silent
	}
	err = l.conn.SetDeadline(time.Now().Add(patience))
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
		l.silent, l.hasty = fmt.Errorf("that process does not answer: %w", err), patience < x.patience
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
		a, _, err := x.ask(l, &ipcRequest{Op: "open", Export: h.Export, Token: h.Token}, x.patience)
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
		_, _, _ = x.ask(l, &ipcRequest{Op: "close", Export: h.Export}, x.farewell)
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

// follow makes s wait for the operations that precede the handle.
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
