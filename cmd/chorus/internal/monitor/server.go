package monitor

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/gochorus/chorus/internal/connlimit"
)

//go:embed page.html
var page []byte

const (
	requestTime = 5 * time.Second  // to read a request
	answerTime  = 10 * time.Second // to write an answer
	maxHeader   = 16 << 10
	idleTime    = 5 * time.Second // until the next request of a connection
	maxAnswers  = 8               // of an address at the same time
	maxConns    = 64              // of an address
)

// statusPath is the path of the job's state as JSON.
const statusPath = "/status.json"

// A Server serves the state of a job over HTTP.
type Server struct {
	source *Source
	labels Labels
	open   []*http.Server
}

// NewServer returns a server that has no address yet.
func NewServer(s *Source, l Labels) *Server {
	return &Server{source: s, labels: l}
}

// Serve answers on ln until Close. trusted decides whether the Host header of a request is
// acceptable; nil accepts all of them. Each address has its own limits, so that those who read metrics cannot keep the owner
// from reading the status.
func (s *Server) Serve(ln net.Listener, trusted func(host string) bool) {
	h := &http.Server{
		Handler: s.guarded(s.routes(), trusted), ReadTimeout: requestTime, WriteTimeout: answerTime, IdleTimeout: idleTime,
		MaxHeaderBytes: maxHeader, ConnState: func(c net.Conn, state http.ConnState) { connlimit.SetActive(c, state == http.StateActive) },
		ErrorLog: log.New(io.Discard, "", 0), // strangers could fill a log
	}
	s.open = append(s.open, h)
	limited := connlimit.New(ln, maxConns)
	go func() { _ = h.Serve(limited) }() // Close ends it
}

// Close ends all connections.
func (s *Server) Close() error {
	var errs []error
	for _, h := range s.open {
		errs = append(errs, h.Close())
	}
	return errors.Join(errs...)
}

func (s *Server) routes() http.Handler {
	reg := prometheus.NewRegistry()
	reg.MustRegister(newCollector(s.source, s.labels))
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(reg, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError}))
	mux.HandleFunc("GET "+statusPath, s.serveStatus)
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		w.Header().Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'")
		_, _ = w.Write(page) // the reader may be gone
	})
	return mux
}

func (s *Server) serveStatus(w http.ResponseWriter, r *http.Request) {
	j, err := s.source.Job(r.Context())
	if err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(j) // the reader may be gone
}

// guarded refuses requests with a foreign Host header, with a body, or beside too many others.
// A page of another site can make a browser send requests to this address under the name of that
// site (DNS rebinding); its Host header then has the name.
func (s *Server) guarded(next http.Handler, trusted func(string) bool) http.Handler {
	slots := make(chan struct{}, maxAnswers)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.Header().Set("Cache-Control", "no-store")
		switch {
		case trusted != nil && !trusted(r.Host):
			http.Error(w, "this address does not serve the host in the request; use an IP address, localhost or the name in CHORUS_METRICS", http.StatusForbidden)
			return
		case r.ContentLength != 0:
			http.Error(w, "requests have no body here", http.StatusRequestEntityTooLarge)
			return
		}
		select {
		case slots <- struct{}{}:
			defer func() { <-slots }()
			next.ServeHTTP(w, r)
		default:
			http.Error(w, "too many requests at the same time", http.StatusTooManyRequests)
		}
	})
}

// Listen opens an address of CHORUS_METRICS. It refuses an address without a host, which would
// mean all interfaces. public reports that other hosts can reach the address.
func Listen(ctx context.Context, addr string) (ln net.Listener, public bool, err error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil || port == "" {
		return nil, false, fmt.Errorf("metrics at %q: want host:port, such as 127.0.0.1:9400", addr)
	}
	if host == "" {
		return nil, false, fmt.Errorf("metrics at %q: the host is missing: write 127.0.0.1:%s, or 0.0.0.0:%[2]s if other hosts may read them", addr, port)
	}
	var lc net.ListenConfig
	if ln, err = lc.Listen(ctx, "tcp", addr); err != nil {
		return nil, false, fmt.Errorf("metrics at %s: %w", addr, err)
	}
	at, ok := ln.Addr().(*net.TCPAddr)
	return ln, !ok || !at.IP.IsLoopback(), nil
}

// TrustedHosts returns a check of Host headers for an address of CHORUS_METRICS. It accepts IP
// addresses, localhost, the name in the address, and the name of this host: no site can make a
// browser use these for another address.
func TrustedHosts(addr string) func(string) bool {
	configured, _, _ := net.SplitHostPort(addr)
	own, _ := os.Hostname() // "" is never equal
	return func(host string) bool {
		name, _, err := net.SplitHostPort(host)
		if err != nil {
			name = strings.Trim(host, "[]")
		}
		switch {
		case name == "":
			return false
		case net.ParseIP(name) != nil:
			return true
		}
		return strings.EqualFold(name, "localhost") || strings.EqualFold(name, configured) || strings.EqualFold(name, own)
	}
}
