package gpu

import (
	"fmt"
	"slices"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// Capturing reports whether the stream is being captured into a graph.
func (s *Stream) Capturing() (bool, error) { return s.dev.Capturing(s.h) }

// BeginCapture captures operations that are enqueued on s from now on into the graph
// (cuStreamBeginCapture). The graph's memory comes from the pool. In a mode other than the
// relaxed one the goroutine is locked to its thread until EndCapture.
func (s *Stream) BeginCapture(mode cudadrv.CaptureMode, graph Holder, pool Holdable) error {
	const op = "stream: begin capture"
	if err := s.Check(op, nil); err != nil {
		return err
	}
	errs := s.dev.sys.errs
	if s.kind == DefaultStream {
		return fmt.Errorf("%s: %s cannot be captured: take one of New or FromPool: %w", op, s,
			errs.Status(cudadrv.ErrorStreamCaptureUnsupported))
	}
	if err := s.RefuseCapture(op, "captures do not nest"); err != nil {
		return err
	}
	if mode != cudadrv.CaptureRelaxed {
		if other := exclusive(); other != nil {
			return errs.Captured(op, "another stream of this goroutine, for "+other.graph.String()+",", "captures do not nest")
		}
	}
	c := &Capture{Stream: s, graph: graph, mode: mode, pool: pool, held: []Holdable{pool}}
	if err := c.register(func() error { return s.begin(c) }); err != nil {
		return err
	}
	pool.Hold(graph)
	return nil
}

// begin begins the capture in the driver.
func (s *Stream) begin(c *Capture) error {
	err := s.dev.Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamBeginCapture(s.h, c.mode) })
	if err != nil {
		return err
	}
	if _, c.ID, err = s.captureInfo(); err != nil {
		_, _ = s.endCapture()
	}
	return err
}

// A Captured is what EndCapture returns.
type Captured struct {
	Graph  cudadrv.Graph
	Held   []Holdable // objects that the graph holds
	Strays []string   // streams that the capturing goroutine used outside of the capture
}

// EndCapture ends the capture that BeginCapture began on s (cuStreamEndCapture). After an
// error the capture has ended too, and x.Held has the objects to release. Unless the mode
// is relaxed, the caller must be on the thread of BeginCapture.
func (s *Stream) EndCapture(graph Holder) (x Captured, err error) {
	x.Graph, err = s.endCapture()
	c := find(func(o *Capture) bool { return o.graph == graph })
	if c == nil {
		return x, err
	}
	c.forget()
	c.mu.Lock()
	defer c.mu.Unlock()
	x.Held, x.Strays = c.held, c.strays()
	return x, err
}

func (s *Stream) endCapture() (g cudadrv.Graph, err error) {
	err = s.dev.Do(func(drv cudadrv.Driver) (r cudadrv.Result) {
		g, r = drv.StreamEndCapture(s.h)
		return r
	})
	return g, err
}

func (s *Stream) captureInfo() (status cudadrv.CaptureStatus, id uint64, err error) {
	err = s.dev.Do(func(drv cudadrv.Driver) (r cudadrv.Result) {
		status, id, r = drv.StreamGetCaptureInfo(s.h)
		return r
	})
	return status, id, err
}

// CaptureID returns the id of the capture that s takes part in, or 0. Ids are unique in
// the System. A capture that an illegal call has invalidated has no id; CaptureID then
// returns CUDA_ERROR_STREAM_CAPTURE_INVALIDATED.
func (s *Stream) CaptureID() (uint64, error) {
	if !AnyCapture() {
		return 0, nil
	}
	status, id, err := s.captureInfo()
	if err == nil && status == cudadrv.CaptureInvalidated {
		return 0, fmt.Errorf("stream: an earlier call has invalidated the capture of %s: end the capture, and capture again without that call: %w",
			s, s.dev.sys.errs.Status(cudadrv.ErrorStreamCaptureInvalidated))
	}
	return id, err
}

// current returns the capture that s takes part in, if Chorus began one.
func (s *Stream) current() (*Capture, error) {
	id, err := s.CaptureID()
	if err != nil || id == 0 {
		return nil, err
	}
	return find(func(o *Capture) bool { return o.ID == id && o.Stream.dev.sys == s.dev.sys }), nil
}

// CapturePool returns the pool of the capture that s takes part in, or nil.
func (s *Stream) CapturePool() (Holdable, error) {
	c, err := s.current()
	if c == nil {
		return nil, err
	}
	return c.pool, nil
}

// Captured records that operations on s use x: if s is being captured, the graph holds x.
func (s *Stream) Captured(x Holdable) error {
	c, err := s.current()
	if c == nil {
		s.use()
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !slices.Contains(c.held, x) {
		c.held = append(c.held, x)
		x.Hold(c.graph)
	}
	return nil
}
