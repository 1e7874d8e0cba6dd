package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"
)

// A Store is the store of the job.
type Store interface {
	Set(ctx context.Context, key string, value []byte) error
	Get(ctx context.Context, key string) ([]byte, error)
}

// trips is the number of exchanges of a clock. The fastest one counts.
const trips = 8

// measureClock compares the clock of this host with the clock of rank 0, which answers by
// serveClock.
func measureClock(ctx context.Context, s Store, node int) (*Skew, error) {
	var best *Skew
	for i := range trips {
		asked := time.Now()
		if err := s.Set(ctx, clockKey("ask", node, i), nil); err != nil {
			return nil, err
		}
		text, err := s.Get(ctx, clockKey("answer", node, i))
		if err != nil {
			return nil, err
		}
		trip := time.Since(asked)
		var then time.Time
		if err := then.UnmarshalText(text); err != nil {
			return nil, fmt.Errorf("doctor: the clock of rank 0: %w", err)
		}
		if best == nil || trip < best.Trip {
			best = &Skew{Offset: then.Sub(asked.Round(0)) - trip/2, Trip: trip} // Round removes the monotonic time
		}
	}
	return best, nil
}

// serveClock answers the questions of one host.
func serveClock(ctx context.Context, s Store, node int) error {
	for i := range trips {
		if _, err := s.Get(ctx, clockKey("ask", node, i)); err != nil {
			return err
		}
		text, err := time.Now().MarshalText()
		if err != nil {
			return err
		}
		if err := s.Set(ctx, clockKey("answer", node, i), text); err != nil {
			return err
		}
	}
	return nil
}

func clockKey(what string, node, i int) string { return fmt.Sprintf("clock/%s/%d/%d", what, node, i) }

// Exchange measures the clocks and the ports of the hosts, numbered from 0 to nodes-1. All hosts
// call it with their facts, which name the reason if the exchange fails.
func Exchange(ctx context.Context, s Store, h *Host, f *Facts, node, nodes int) {
	var wg sync.WaitGroup
	errs := make([]error, nodes+1)
	if node == 0 {
		for n := 1; n < nodes; n++ {
			wg.Go(func() { errs[n] = serveClock(ctx, s, n) })
		}
	} else {
		wg.Go(func() { f.Skew, errs[node] = measureClock(ctx, s, node) })
	}
	errs[nodes] = f.tryPorts(ctx, s, h, node, nodes)
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		f.Broken = reasonOf(err)
	}
}

// mostDialed limits the hosts that a host connects to.
const mostDialed = 31

// dialTime limits the time of a connection.
const dialTime = 2 * time.Second

// An endpoint is the address that a host listens on, or "".
type endpoint struct{ Host, Addr string }

// tryPorts listens on a port that the kernel chooses, as NCCL does, and connects to the other
// hosts. It returns when the other hosts have tried this host.
func (f *Facts) tryPorts(ctx context.Context, s Store, h *Host, node, nodes int) error {
	me := endpoint{Host: h.Name}
	l, err := h.listen(ctx)
	if err != nil {
		f.Broken = "no port to listen on: " + reasonOf(err)
	} else {
		defer l.Close()
		go acceptAll(l)
		me.Addr = l.Addr().String()
	}
	text, err := json.Marshal(me)
	if err != nil {
		return err
	}
	if err := s.Set(ctx, fmt.Sprintf("port/%d", node), text); err != nil {
		return err
	}
	for i := 1; i < nodes && i <= mostDialed; i++ {
		if err := f.tryPort(ctx, s, (node+i)%nodes); err != nil {
			return err
		}
	}
	if err := s.Set(ctx, fmt.Sprintf("dialed/%d", node), nil); err != nil {
		return err
	}
	for n := range nodes {
		if _, err := s.Get(ctx, fmt.Sprintf("dialed/%d", n)); err != nil {
			return err
		}
	}
	return nil
}

// tryPort connects to a host and notes a failure.
func (f *Facts) tryPort(ctx context.Context, s Store, node int) error {
	text, err := s.Get(ctx, fmt.Sprintf("port/%d", node))
	if err != nil {
		return err
	}
	var to endpoint
	if err := json.Unmarshal(text, &to); err != nil {
		return fmt.Errorf("doctor: the address of host %d: %w", node, err)
	}
	if to.Addr == "" { // that host has a reason
		return nil
	}
	d := net.Dialer{Timeout: dialTime}
	c, err := d.DialContext(ctx, "tcp", to.Addr)
	if err != nil {
		f.Ports = append(f.Ports, fmt.Sprintf("host %s at %s: %v", to.Host, to.Addr, err))
		return nil
	}
	return c.Close()
}

// listen listens on the interface that NCCL uses.
func (h *Host) listen(ctx context.Context) (net.Listener, error) {
	chosen, err := h.chosen()
	if err != nil {
		return nil, err
	}
	if len(chosen) == 0 {
		return nil, errors.New("NCCL has no interface (see ifname)")
	}
	for _, a := range chosen[0].Addrs {
		if addr := a.Addr(); !addr.IsLinkLocalUnicast() {
			var lc net.ListenConfig
			return lc.Listen(ctx, "tcp", net.JoinHostPort(addr.String(), "0"))
		}
	}
	return nil, fmt.Errorf("%s has no address of the network", chosen[0].Name)
}

// acceptAll accepts and closes connections until the listener is closed.
func acceptAll(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		_ = c.Close()
	}
}
