package ras

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"time"
)

const (
	// defaultAddress is where NCCL's service listens without NCCL_RAS_ADDR.
	defaultAddress = "localhost:28028"
	// tries limits the attempts to connect. All processes of a host share the port, and the
	// kernel chooses one of them for a connection: another one answers if that process is stopped.
	tries = 4
	// collectSeconds is how long the service waits for processes that do not answer.
	collectSeconds = 1
	// maxLine limits a line of the handshake, in bytes.
	maxLine = 256
)

// limits are the time limits of Ask.
type limits struct {
	all time.Duration
	try time.Duration // of one attempt to connect
}

var askLimits = limits{all: 2 * time.Second, try: 250 * time.Millisecond}

// Address returns the address of the service, or "" if there is none to ask: NCCL_RAS_ENABLE=0
// disables it. Virtual devices have no service, so they need NCCL_RAS_ADDR.
func Address(virtual bool) string {
	if v := strings.TrimSpace(os.Getenv("NCCL_RAS_ENABLE")); v != "" {
		if n, err := strconv.ParseInt(v, 0, 64); err == nil && n == 0 {
			return ""
		}
	}
	addr := os.Getenv("NCCL_RAS_ADDR")
	if addr == "" && !virtual {
		addr = defaultAddress
	}
	return addr
}

// Ask returns the answer of the service at an address. It takes at most two seconds.
func Ask(addr string) (*Answer, error) { return askLimits.ask(addr) }

func (l limits) ask(addr string) (*Answer, error) {
	end := time.Now().Add(l.all)
	c, err := l.dial(addr, end)
	if err != nil {
		return nil, fmt.Errorf("ras: %s: %w", addr, err)
	}
	defer c.Close()
	b, err := c.status(end)
	if err != nil {
		return nil, fmt.Errorf("ras: %s: %w", addr, err)
	}
	return Decode(b)
}

// A conn is a connection to the service.
type conn struct {
	net.Conn
	r *bufio.Reader
}

// dial connects to a process that answers the handshake.
func (l limits) dial(addr string, end time.Time) (c *conn, err error) {
	for range tries {
		c, err = l.connect(addr, end)
		var late net.Error
		if !errors.As(err, &late) || !late.Timeout() {
			break // it answers, no process listens, or it is another service
		}
	}
	return c, err
}

// connect connects and exchanges the versions of the protocol.
func (l limits) connect(addr string, end time.Time) (*conn, error) {
	if limit := time.Now().Add(l.try); limit.Before(end) {
		end = limit
	}
	d := net.Dialer{Deadline: end}
	raw, err := d.Dial("tcp", addr)
	if err != nil {
		return nil, err
	}
	c := &conn{raw, bufio.NewReaderSize(raw, maxLine)}
	_ = c.SetDeadline(end) // a connection of TCP has deadlines
	answer, err := c.call("CLIENT PROTOCOL 2")
	if err == nil {
		version, ok := strings.CutPrefix(answer, "SERVER PROTOCOL ")
		if _, bad := strconv.ParseUint(version, 10, 31); !ok || bad != nil {
			err = fmt.Errorf("the answer to the handshake is %.40q: want SERVER PROTOCOL", answer)
		}
	}
	if err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

// call sends a line and returns the line that the service answers.
func (c *conn) call(line string) (string, error) {
	if _, err := io.WriteString(c, line+"\n"); err != nil {
		return "", err
	}
	b, err := c.r.ReadSlice('\n')
	if errors.Is(err, bufio.ErrBufferFull) {
		err = fmt.Errorf("a line of the answer has more than %d bytes", maxLine)
	}
	return strings.TrimRight(string(b), "\r\n"), err
}

// status returns the state of all communicators, in JSON.
func (c *conn) status(end time.Time) ([]byte, error) {
	_ = c.SetDeadline(end)
	for _, line := range []string{fmt.Sprint("TIMEOUT ", collectSeconds), "SET FORMAT json"} {
		answer, err := c.call(line)
		if err == nil && answer != "OK" {
			err = fmt.Errorf("the answer to %s is %.80q: NCCL 2.28.7 and newer answer OK", line, answer)
		}
		if err != nil {
			return nil, err
		}
	}
	if _, err := io.WriteString(c, "STATUS\n"); err != nil {
		return nil, err
	}
	b, err := io.ReadAll(io.LimitReader(c.r, MaxAnswer+1))
	if err == nil && len(b) > MaxAnswer {
		err = fmt.Errorf("the answer has more than %d bytes", MaxAnswer)
	}
	return b, err
}
