package monitor

import (
	"context"
	"crypto/rand"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/safe"
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
		MaxHeaderBytes: maxHeader, ConnState: func(c net.Conn, state http.ConnState) { safe.SetActive(c, state == http.StateActive) },
		ErrorLog: log.New(io.Discard, "", 0), // strangers could fill a log
	}
	s.open = append(s.open, h)
	limited := safe.NewListener(ln, maxConns)
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

// ErrAddress matches errors of Listen that are mistakes in the address, whatever runs on the host.
var ErrAddress = errors.New("not an address for metrics")

// Listen opens an address of CHORUS_METRICS. It refuses an address without a host, which would
// mean all interfaces: such a mistake matches ErrAddress. public reports that other hosts can reach the address.
func Listen(ctx context.Context, addr string) (ln net.Listener, public bool, err error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil || port == "" {
		return nil, false, fmt.Errorf("metrics at %q: %w: want host:port, such as 127.0.0.1:9400", addr, ErrAddress)
	}
	if host == "" {
		return nil, false, fmt.Errorf("metrics at %q: %w: the host is missing: write 127.0.0.1:%s, or 0.0.0.0:%[3]s if other hosts may read them", addr, ErrAddress, port)
	}
	if _, err := net.LookupPort("tcp", port); err != nil {
		return nil, false, fmt.Errorf("metrics at %q: %w: %w: want a port from 1 to 65535, or 0 for any free one", addr, ErrAddress, err)
	}
	var lc net.ListenConfig
	switch ln, err = lc.Listen(ctx, "tcp", addr); {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, false, fmt.Errorf("metrics at %s: %w: another job or program has the port: choose another one with --metrics or %s, or port 0 for any free one", addr, err, env.Metrics.Name)
	case err != nil:
		return nil, false, fmt.Errorf("metrics at %s: %w: choose an address of this host with --metrics or %s", addr, err, env.Metrics.Name)
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

// prefix begins the names of the sockets of this user. The sockets are abstract, as those of
// package cluster: they have no file, and end with their process.
func prefix() string { return fmt.Sprintf("@chorus-status-%d-", os.Geteuid()) }

// ListenLocal opens a Unix socket for `chorus status` on this host. It accepts only processes
// of this user and of root, so that the command needs no secret.
func ListenLocal() (net.Listener, error) {
	ln, err := net.Listen("unix", prefix()+rand.Text())
	if err != nil {
		return nil, fmt.Errorf("open the socket of chorus status: %w", err)
	}
	return sameUserListener{ln}, nil
}

// A sameUserListener closes connections of other users.
type sameUserListener struct{ net.Listener }

func (l sameUserListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if safe.CheckUser(c.(*net.UnixConn)) == nil {
			return c, nil
		}
		c.Close()
	}
}

// maxJob limits the answer that a client reads.
const maxJob = 64 << 20

// A Client reads the state of one job.
type Client struct {
	http   http.Client
	socket string
	own    atomic.Bool  // a process of this user or of root has accepted a connection
	pid    atomic.Int64 // of the launcher; 0 before the first connection
}

// sockets returns the sockets on this host that have a name of a job of this user, and do not belong to another user.
// Those of this user come first.
func sockets() ([]safe.NamedListener, error) {
	all, err := safe.NamedListeners(prefix())
	if err != nil {
		return nil, err
	}
	return candidates(all), nil
}

func candidates(all []safe.NamedListener) (list []safe.NamedListener) {
	for _, owner := range []safe.Owner{safe.ThisUser, safe.UnknownOwner} {
		for _, s := range all {
			if s.Owner == owner && isRandomText(strings.TrimPrefix(s.Name, prefix())) {
				list = append(list, s)
			}
		}
	}
	return list
}

// isRandomText reports whether s may be a result of rand.Text.
func isRandomText(s string) bool {
	return len(s) == 26 && strings.Trim(s, "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567") == ""
}

// newClient returns a client for a socket, and refuses a socket of another
// user.
func newClient(socket string) *Client {
	client := &Client{socket: socket}
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		c, err := d.DialContext(ctx, "unix", socket)
		if err != nil {
			return nil, err
		}
		pid, err := safe.PeerOf(c.(*net.UnixConn))
		if err != nil {
			c.Close()
			return nil, err
		}
		client.own.Store(true)
		client.pid.Store(int64(pid))
		return c, nil
	}
	client.http = http.Client{Timeout: askTime + answerTime, Transport: &http.Transport{DialContext: dial}}
	return client
}

// Job reads the state of the job.
func (c *Client) Job(ctx context.Context) (*Job, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://chorus"+statusPath, nil)
	if err != nil {
		return nil, err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxJob))
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, errors.New(strings.TrimSpace(safe.Text(string(text))))
	}
	j := new(Job)
	if err := json.Unmarshal(text, j); err != nil {
		return nil, err
	}
	safe.Record(j)
	return j, nil
}

// A Choice says which job a command asks for. The zero Choice is the only job of this user on this host.
type Choice struct {
	Job string // its name, or ""
	PID int    // of one of its launchers on this host, or 0
}

// A NotFoundError reports that no such job runs on this host.
type NotFoundError struct {
	Choice
	// Silent is the number of sockets that have a name of a job of this user, refuse connections, and may be another user's.
	Silent int
}

func (e *NotFoundError) Error() string {
	text := "this user runs no job"
	if e.Job != "" {
		text += fmt.Sprintf(" %q", e.Job)
	}
	text += " of chorus run on this host"
	if e.PID != 0 {
		text += fmt.Sprintf(" whose launcher is process %d", e.PID)
	}
	if e.Silent > 0 {
		text += fmt.Sprintf("; %d sockets whose owners are unknown have names of such jobs and refuse connections", e.Silent)
	}
	return text
}

// Find returns a client and the state of a job.
func Find(ctx context.Context, which Choice) (*Client, *Job, error) {
	list, err := sockets()
	if err != nil {
		return nil, nil, err
	}
	return find(ctx, list, which)
}

// haveEnded returns a function that reports whether a socket has ended.
func haveEnded() func(name string) bool {
	list, err := safe.NamedListeners(prefix())
	open := map[string]bool{}
	for _, s := range list {
		open[s.Name] = true
	}
	return func(name string) bool { return err == nil && !open[name] }
}

// HasEnded reports whether the launcher that answered has ended.
func (c *Client) HasEnded() bool { return haveEnded()(c.socket) }

const (
	findTime    = askTime + answerTime // for all sockets together
	findAtATime = 16
)

// An answer is that of one socket.
type answer struct {
	client *Client
	job    *Job
	err    error
}

// ask asks all sockets for their jobs, the first ones first.
func ask(ctx context.Context, list []safe.NamedListener) []answer {
	answers := make([]answer, len(list))
	next := make(chan int)
	var wg sync.WaitGroup
	for range min(findAtATime, len(list)) {
		wg.Go(func() {
			for i := range next {
				a := &answers[i]
				a.client = newClient(list[i].Name)
				a.client.own.Store(list[i].Owner == safe.ThisUser)
				a.job, a.err = a.client.Job(ctx)
			}
		})
	}
	for i := range list {
		next <- i
	}
	close(next)
	wg.Wait()
	return answers
}

// find is Find for a list of sockets.
func find(ctx context.Context, list []safe.NamedListener, which Choice) (*Client, *Job, error) {
	limited, cancel := context.WithTimeout(ctx, findTime)
	defer cancel()
	answers := ask(limited, list)
	hasEnded := sync.OnceValue(haveEnded) // after the answers: a job that ends during the question closes the connection
	var client *Client
	var found *Job
	var last error
	silent := 0
	for _, a := range answers {
		c, j := a.client, a.job
		switch {
		case errors.Is(a.err, syscall.ECONNREFUSED): // the job has ended
		case isOthers(a.err): // another user listens at a name of this user
		case a.err != nil && hasEnded()(c.socket):
		case a.err != nil && c.own.Load():
			last = a.err
		case a.err != nil:
			silent++
		case which.Job != "" && j.Job != which.Job, which.PID != 0 && int64(which.PID) != c.pid.Load():
		case found == nil:
			client, found = c, j
		case found.Job != j.Job:
			return nil, nil, fmt.Errorf("several jobs run on this host: choose one of them with --job, such as %s or %s", found.Job, j.Job)
		case found.isOther(j):
			return nil, nil, fmt.Errorf("several jobs with the name %s run on this host: choose one of them by a process ID of its chorus run with --pid, such as %d or %d",
				j.Job, client.pid.Load(), c.pid.Load())
		}
	}
	switch {
	case found != nil:
		return client, found, nil
	case ctx.Err() != nil:
		return nil, nil, ctx.Err()
	case last != nil:
		return nil, nil, fmt.Errorf("a job runs on this host and does not answer: %w", last)
	}
	return nil, nil, &NotFoundError{which, silent}
}

// isOther reports whether two states of jobs with one name are those of two jobs. Several launchers of one job may run on one host.
// A job whose hosts have not joined is not known to be another one.
func (j *Job) isOther(k *Job) bool {
	common := slices.ContainsFunc(j.Launchers, func(id string) bool { return slices.Contains(k.Launchers, id) })
	return !common && len(j.Launchers) > 0 && len(k.Launchers) > 0
}

func isOthers(err error) bool {
	_, others := errors.AsType[*safe.UserError](err)
	return others
}

// Next reads the state again after a time that is long enough for rates.
func (c *Client) Next(ctx context.Context, after time.Duration) (*Job, error) {
	t := time.NewTimer(max(after, fresh))
	defer t.Stop()
	select {
	case <-t.C:
		return c.Job(ctx)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}
