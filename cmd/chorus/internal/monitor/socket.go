package monitor

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/gochorus/chorus/internal/plain"
	"github.com/gochorus/chorus/internal/sameuser"
)

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
		if sameuser.Check(c.(*net.UnixConn)) == nil {
			return c, nil
		}
		c.Close()
	}
}

// maxJob limits the answer that a client reads.
const maxJob = 64 << 20

// A Client reads the state of one job.
type Client struct{ http http.Client }

// sockets returns the names of the sockets on this host.
func sockets() ([]string, error) {
	f, err := os.Open("/proc/net/unix")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(f)
	if err != nil {
		return nil, err
	}
	return socketsIn(string(text)), nil
}

// socketsIn returns the names of the sockets in the text of /proc/net/unix. Other users choose names of abstract sockets, which
// the kernel prints as they are, with line ends: any line may be theirs, and sameuser decides.
func socketsIn(text string) (list []string) {
	for line := range strings.SplitSeq(text, "\n") {
		fields := strings.SplitN(line, " ", 8) // the first seven have no spaces beside them, except the inode
		if len(fields) < 8 {
			continue
		}
		name := strings.TrimLeft(fields[7], " ")
		if random, ok := strings.CutPrefix(name, prefix()); ok && isRandomText(random) && !slices.Contains(list, name) {
			list = append(list, name)
		}
	}
	return list
}

// isRandomText reports whether s may be a result of rand.Text.
func isRandomText(s string) bool {
	return len(s) == 26 && strings.Trim(s, "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567") == ""
}

// newClient returns a client for a socket. It refuses a socket of another user.
func newClient(socket string) *Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		c, err := d.DialContext(ctx, "unix", socket)
		if err != nil {
			return nil, err
		}
		if err := sameuser.Check(c.(*net.UnixConn)); err != nil {
			c.Close()
			return nil, err
		}
		return c, nil
	}
	return &Client{http.Client{Timeout: askTime + answerTime, Transport: &http.Transport{DialContext: dial}}}
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
		return nil, errors.New(strings.TrimSpace(plain.Text(string(text))))
	}
	j := new(Job)
	if err := json.Unmarshal(text, j); err != nil {
		return nil, err
	}
	plain.Record(j)
	return j, nil
}

// A NotFoundError reports that no job runs on this host.
type NotFoundError struct{ Job string }

func (e *NotFoundError) Error() string {
	if e.Job != "" {
		return fmt.Sprintf("this user runs no job %q of chorus run on this host", e.Job)
	}
	return "this user runs no job of chorus run on this host"
}

// Find returns a client and the state of the job with a name. An empty name means the only job
// of this user on this host.
func Find(ctx context.Context, name string) (*Client, *Job, error) {
	names, err := sockets()
	if err != nil {
		return nil, nil, err
	}
	return find(ctx, names, name)
}

// hasEnded reports whether a socket has ended.
func hasEnded(socket string) bool {
	names, err := sockets()
	return err == nil && !slices.Contains(names, socket)
}

// find is Find for a list of sockets.
func find(ctx context.Context, names []string, name string) (*Client, *Job, error) {
	var client *Client
	var found *Job
	var last error
	for _, socket := range names {
		c := newClient(socket)
		j, err := c.Job(ctx)
		switch {
		case errors.Is(err, syscall.ECONNREFUSED): // the job has ended
		case isOthers(err): // another user listens at a name of this user
		case err != nil:
			if !hasEnded(socket) { // a job that ends during the question closes the connection
				last = err
			}
		case name != "" && j.Job != name:
		case found != nil && found.Job != j.Job:
			return nil, nil, fmt.Errorf("several jobs run on this host: choose one of them with --job, such as %s or %s", found.Job, j.Job)
		case found == nil:
			client, found = c, j
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
	return nil, nil, &NotFoundError{name}
}

func isOthers(err error) bool {
	_, others := errors.AsType[*sameuser.Error](err)
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
