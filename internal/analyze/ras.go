package analyze

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gochorus/chorus/internal/safe"
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

// limits are the time limits of AskRAS.
type rasLimits struct {
	all time.Duration
	try time.Duration // of one attempt to connect
}

var askLimits = rasLimits{all: 2 * time.Second, try: 250 * time.Millisecond}

// RASAddress returns the address of the service, or "" if there is none to ask: NCCL_RAS_ENABLE=0
// disables it. Virtual devices have no service, so they need NCCL_RAS_ADDR.
func RASAddress(virtual bool) string {
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

// AskRAS returns the answer of the service at an address, within at most two
// seconds.
func AskRAS(addr string) (*RASAnswer, error) { return askLimits.ask(addr) }

func (l rasLimits) ask(addr string) (*RASAnswer, error) {
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
	return DecodeRAS(b)
}

// A conn is a connection to the service.
type rasConn struct {
	net.Conn
	r *bufio.Reader
}

// dial connects to a process that answers the handshake.
func (l rasLimits) dial(addr string, end time.Time) (c *rasConn, err error) {
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
func (l rasLimits) connect(addr string, end time.Time) (*rasConn, error) {
	if limit := time.Now().Add(l.try); limit.Before(end) {
		end = limit
	}
	d := net.Dialer{Deadline: end}
	raw, err := d.Dial("tcp", addr)
	if err != nil {
		return nil, err
	}
	c := &rasConn{raw, bufio.NewReaderSize(raw, maxLine)}
	_ = c.SetDeadline(end) // a connection of TCP has deadlines
	answer, err := c.call("CLIENT PROTOCOL 2")
	if err == nil {
		version, ok := strings.CutPrefix(answer, "SERVER PROTOCOL ")
		if _, bad := strconv.ParseUint(version, 10, 31); !ok || bad != nil {
			err = fmt.Errorf("the answer to the handshake is %.40q and not SERVER PROTOCOL: another program than NCCL's RAS service listens there", answer)
		}
	} else {
		err = fmt.Errorf("no answer to the handshake of NCCL's RAS service: %w", err)
	}
	if err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

// call sends a line and returns the line that the service answers.
func (c *rasConn) call(line string) (string, error) {
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
func (c *rasConn) status(end time.Time) ([]byte, error) {
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
	b, err := io.ReadAll(io.LimitReader(c.r, MaxRASAnswer+1))
	if err == nil && len(b) > MaxRASAnswer {
		err = fmt.Errorf("the answer has more than %d bytes", MaxRASAnswer)
	}
	return b, err
}

// MaxRASAnswer limits an answer, in bytes. A rank of a communicator has about 600 bytes.
const MaxRASAnswer = 16 << 20

// Limits of an answer's content.
const (
	maxSize   = 1 << 20 // ranks of a communicator
	maxCounts = 64      // kinds of operations of a rank
	maxName   = 64      // bytes of an address or a hash
)

// kindName matches the names of kinds of operations, such as AllReduce.
var kindName = regexp.MustCompile(`^[A-Za-z0-9_]{1,32}$`)

// An RASAnswer is the state of the communicators of a job.
type RASAnswer struct {
	NCCL          string            `json:"nccl_version"`
	Communicators []RASCommunicator `json:"communicators"`
}

// A RASCommunicator has the ranks that the service knows.
type RASCommunicator struct {
	Hash      string    `json:"hash"`
	Secondary string    `json:"secondary_hash"` // tells communicators with one hash apart
	Size      int       `json:"size"`
	Ranks     []RASRank `json:"ranks"`
	Missing   []RASRank `json:"missing_ranks"` // ranks that have not reported this communicator
}

// A RASRank is a rank of a communicator, with its process.
type RASRank struct {
	Rank   int               `json:"rank"`
	Host   string            `json:"host"` // an address
	PID    int               `json:"pid"`  // -1 if not known
	Device int               `json:"cuda_dev"`
	Status RASStatus         `json:"status"`
	Counts map[string]uint64 `json:"collective_counts"` // operations that were launched, by kind
}

// A RASStatus says whether a rank has failed or, if the rank is missing, why.
type RASStatus struct {
	InitState    int  `json:"init_state"`  // an ncclResult_t
	AsyncError   int  `json:"async_error"` // an ncclResult_t
	Unresponsive bool `json:"unresponsive"`
	Dead         bool `json:"considered_dead"`
}

// missingComma matches the place of a comma that NCCL 2.28.9 omits in each missing rank.
var missingComma = regexp.MustCompile(`("nvml_dev": *-?[0-9]+)(\s*"status")`)

// DecodeRAS reads an answer in JSON. It ignores fields that it does not know, because each version of
// NCCL may add some.
func DecodeRAS(b []byte) (*RASAnswer, error) {
	if err := safe.CheckObjects(b); err != nil {
		return nil, fmt.Errorf("ras: the answer has %w", err)
	}
	d := json.NewDecoder(bytes.NewReader(missingComma.ReplaceAll(b, []byte("$1,$2"))))
	a := new(RASAnswer)
	if err := d.Decode(a); err != nil {
		if errors.Is(err, io.ErrUnexpectedEOF) {
			return nil, fmt.Errorf("ras: the answer is not JSON of NCCL's RAS service: it is cut off after %d bytes: %w", len(b), err)
		}
		return nil, fmt.Errorf("ras: the answer is not JSON of NCCL's RAS service: %w", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("ras: more bytes follow the answer")
	}
	if len(a.NCCL) > maxName {
		return nil, fmt.Errorf("ras: the version of NCCL has %d bytes: want at most %d", len(a.NCCL), maxName)
	}
	if a.Communicators == nil {
		return nil, errors.New(`ras: the answer has no "communicators"`)
	}
	safe.Record(a)
	for i := range a.Communicators {
		if err := a.Communicators[i].check(); err != nil {
			return nil, fmt.Errorf("ras: communicator %.32s: %w", a.Communicators[i].Hash, err)
		}
	}
	return a, nil
}

func (c *RASCommunicator) check() error {
	if c.Size < 1 || c.Size > maxSize {
		return fmt.Errorf("it has %d ranks: want 1 to %d", c.Size, maxSize)
	}
	if n := max(len(c.Hash), len(c.Secondary)); n > maxName {
		return fmt.Errorf("its hash has %d bytes: want at most %d", n, maxName)
	}
	seen := make(map[int]bool)
	for _, r := range slices.Concat(c.Ranks, c.Missing) {
		switch {
		case r.Rank < 0 || r.Rank >= c.Size:
			return fmt.Errorf("it has %d ranks, and one of them is %d", c.Size, r.Rank)
		case seen[r.Rank]:
			return fmt.Errorf("rank %d occurs twice", r.Rank)
		case len(r.Counts) > maxCounts:
			return fmt.Errorf("rank %d has %d kinds of operations: want at most %d", r.Rank, len(r.Counts), maxCounts)
		case len(r.Host) > maxName:
			return fmt.Errorf("the host of rank %d has %d bytes: want at most %d", r.Rank, len(r.Host), maxName)
		}
		seen[r.Rank] = true
		for kind := range r.Counts {
			if !kindName.MatchString(kind) {
				return fmt.Errorf("rank %d has counts of %.40q, which is not a kind of operations", r.Rank, kind)
			}
		}
	}
	return nil
}

// Of returns the communicators of size ranks in which the process pid has the rank. NCCL's names of
// communicators are not known to its callers. An answer of another job has none of them.
func (a *RASAnswer) Of(rank, size, pid int) *RASAnswer {
	is := func(r RASRank) bool { return r.Rank == rank && r.PID == pid }
	mine := new(RASAnswer)
	for _, c := range a.Communicators {
		if c.Size == size && (slices.ContainsFunc(c.Ranks, is) || slices.ContainsFunc(c.Missing, is)) {
			mine.Communicators = append(mine.Communicators, c)
		}
	}
	return mine
}
