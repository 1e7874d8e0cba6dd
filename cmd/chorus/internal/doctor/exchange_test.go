package doctor

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A memoryStore is a store within one process.
type memoryStore struct {
	mu     sync.Mutex
	values map[string][]byte
	news   chan struct{} // closed at the next change
}

func newStore() *memoryStore {
	return &memoryStore{values: map[string][]byte{}, news: make(chan struct{})}
}

func (s *memoryStore) Set(_ context.Context, key string, value []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.values[key] = append([]byte{}, value...)
	close(s.news)
	s.news = make(chan struct{})
	return nil
}

func (s *memoryStore) Get(ctx context.Context, key string) ([]byte, error) {
	for {
		s.mu.Lock()
		v, ok := s.values[key]
		news := s.news
		s.mu.Unlock()
		if ok {
			return v, nil
		}
		select {
		case <-news:
		case <-ctx.Done():
			return nil, fmt.Errorf("%s: %w", key, ctx.Err())
		}
	}
}

// exchanged returns the facts of three hosts that exchange over the loopback interface.
func exchanged(t *testing.T, change func(node int, w *world)) []*Facts {
	t.Helper()
	s := newStore()
	hosts := make([]*Facts, 3)
	var wg sync.WaitGroup
	for i := range hosts {
		w := healthy()
		w.Name = string(rune('a' + i))
		w.nics = []Interface{{"ens3", 1500, true, prefixes("127.0.0.1/8")}}
		change(i, w)
		hosts[i] = &Facts{Host: w.Name}
		wg.Go(func() { Exchange(t.Context(), s, w.Host, hosts[i], i, len(hosts)) })
	}
	wg.Wait()
	return hosts
}

func TestExchange(t *testing.T) {
	hosts := exchanged(t, func(int, *world) {})
	require.Nil(t, hosts[0].Skew)
	for _, f := range hosts {
		require.Empty(t, f.Ports)
		require.Empty(t, f.Broken)
	}
	for _, f := range hosts[1:] {
		require.Positive(t, f.Skew.Trip)
		require.LessOrEqual(t, f.Skew.Offset.Abs(), f.Skew.Trip, "the hosts have one clock")
	}
}

// A host that cannot listen has the reason, and the others do not try it.
func TestExchangeWithoutPort(t *testing.T) {
	hosts := exchanged(t, func(node int, w *world) {
		switch node {
		case 1:
			w.nics[0].Addrs = prefixes("192.0.2.1/32") // not an address of this machine
		case 2:
			w.nics[0].Addrs = prefixes("fe80::1/64")
		}
	})
	require.Empty(t, hosts[0].Broken)
	require.Contains(t, hosts[1].Broken, "no port to listen on: listen tcp 192.0.2.1:0")
	require.Equal(t, "no port to listen on: ens3 has no address of the network", hosts[2].Broken)
	for _, f := range hosts {
		require.Empty(t, f.Ports)
	}
	results := Compare([]*Check{ports}, hosts)
	require.Equal(t, []Verdict{Unknown, Unknown}, verdicts(results))
}

// A host that does not come breaks the exchange, and the comparisons are unknown.
func TestExchangeWithoutAHost(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	w := healthy()
	w.nics = []Interface{{"ens3", 1500, true, prefixes("127.0.0.1/8")}}
	f := &Facts{Host: "b"}
	Exchange(ctx, newStore(), w.Host, f, 1, 2)
	require.Contains(t, f.Broken, context.DeadlineExceeded.Error())
	for _, c := range []*Check{clockSkew, ports} {
		r := Compare([]*Check{c}, []*Facts{{Host: "a"}, f})[0]
		require.Equal(t, Unknown, r.Verdict)
		require.Contains(t, r.Cause, "host b: ")
	}
}

func TestDialFails(t *testing.T) {
	s := newStore()
	require.NoError(t, s.Set(t.Context(), "port/1", []byte(`{"Host":"b","Addr":"127.0.0.1:1"}`)))
	f := &Facts{}
	require.NoError(t, f.tryPort(t.Context(), s, 1))
	require.Len(t, f.Ports, 1)
	require.Contains(t, f.Ports[0], "host b at 127.0.0.1:1: ")
}
