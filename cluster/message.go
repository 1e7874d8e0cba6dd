package cluster

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/gochorus/chorus/internal/plain"
)

// firstEpoch is the epoch in which a job starts, and the epoch of messages that do not
// belong to one, such as heartbeats.
const firstEpoch = 1

type kind byte

// Kinds of messages. Records are JSON, because they are rare and get new fields.
// Store calls are binary, because values are arbitrary bytes.
const (
	kindWelcome    kind = iota + 1 // coordinator: welcome
	kindRegister                   // member: Member, or host
	kindBeat                       // both: nothing; the coordinator echoes it
	kindPrepare                    // coordinator to agents: nothing; id is the attempt
	kindPrepared                   // agent or worker: nothing; id is the attempt
	kindPlan                       // coordinator to agents: plan
	kindWorld                      // coordinator to workers: world
	kindWho                        // member: nothing; answered by kindRoll
	kindAttendance                 // coordinator: roll
	kindCall                       // worker: call
	kindCancel                     // worker: nothing; id of the call
	kindReply                      // coordinator: call
	kindExit                       // agent: Exit
	kindStop                       // agent: fault
	kindDone                       // agent: nothing; its workers have exited
	kindLeave                      // member: nothing
	kindFault                      // coordinator: fault
	kindNote                       // coordinator to agents: fault that does not stop hosts
	kindEnded                      // coordinator: nothing
	kindRefuse                     // coordinator: refusal
	kindSilent                     // member: nothing; it disconnects from a silent coordinator
	kindResume                     // member, first on a new link: id of the stream; epoch is the number of the request, and id of the last message received
	kindResumed                    // coordinator: nothing; the stream continues on this link
	kindKill                       // agent, and coordinator to agents: nothing; workers must not be given more time
	kindPath                       // agent: pathReport
	kindComplete                   // coordinator to agents: nothing; the world is complete
	kindReady                      // agent: nothing; its workers have exited and can be started again
	kindPropose                    // coordinator to workers: nothing, and to agents: news, of the next epoch; id is the attempt
	kindRevoke                     // coordinator to workers: fault; the epoch ends
	kindRevoked                    // worker: nothing; its function for this epoch has returned
	kindFinished                   // worker: nothing; its function has returned nil
	kindFailed                     // worker: fault; its function has returned an error
	kindFinish                     // coordinator to workers: nothing; all functions have returned nil
	kindDismiss                    // coordinator to workers: nothing; the host leaves the job
	kindHold                       // coordinator to workers: nothing; no step may begin until kindUntil
	kindHeld                       // worker: nothing; id is the number of steps begun
	kindUntil                      // coordinator to workers: nothing; id is the last step of the epoch
	kindOrder                      // coordinator to agents: Order
	kindNews                       // coordinator to agents: news; the epoch has begun
	kindDrain                      // agent: fault; its host leaves the job
	kindStatus                     // agent: nothing; answered by kindReply with a Status
	kindInquiry                    // coordinator to workers: nothing; id is the inquiry
	kindReport                     // worker: its report; id is the inquiry
	kindHandover                   // coordinator: handover; its host leaves the job
	kindElsewhere                  // agent, before registration, and coordinator to agents: elsewhere
	kindLedger                     // coordinator to agents: news with the ledger; id is the number of the entry
	kindRecorded                   // agent: nothing; it has the ledger with the entry id
	kindLast                       // one more than the last
)

// A message is the content of one frame.
type message struct {
	kind  kind
	epoch uint64
	id    uint64 // number of a call, or of an attempt
	body  []byte
}

const messageHeadBytes = 1 + 8 + 8

func (m message) encode() []byte { return append(m.head(), m.body...) }

// head returns the message without its body.
func (m message) head() []byte {
	b := make([]byte, 0, messageHeadBytes)
	b = append(b, byte(m.kind))
	b = binary.BigEndian.AppendUint64(b, m.epoch)
	return binary.BigEndian.AppendUint64(b, m.id)
}

func (m message) bytes() int { return messageHeadBytes + len(m.body) }

func decodeMessage(b []byte) (message, error) {
	if len(b) < messageHeadBytes {
		return message{}, fmt.Errorf("message of %d bytes: want at least %d", len(b), messageHeadBytes)
	}
	m := message{
		kind:  kind(b[0]),
		epoch: binary.BigEndian.Uint64(b[1:]),
		id:    binary.BigEndian.Uint64(b[9:]),
		body:  b[messageHeadBytes:],
	}
	if m.kind == 0 || m.kind >= kindLast {
		return message{}, fmt.Errorf("message of unknown kind %d", m.kind)
	}
	if m.epoch < firstEpoch {
		return message{}, fmt.Errorf("message of epoch %d: epochs start with %d", m.epoch, firstEpoch)
	}
	return m, nil
}

// note creates a message with a record as its body, or without a body if v is nil.
func note(k kind, v any) message {
	m := message{kind: k, epoch: firstEpoch}
	if v != nil {
		b, err := json.Marshal(v)
		if err != nil { // cannot fail: records contain only text and numbers
			panic("cluster: " + err.Error())
		}
		m.body = pack(b)
	}
	return m
}

// record decodes a record into v.
func (m message) record(v any) error {
	b, err := unpack(m.body)
	if err == nil {
		err = json.Unmarshal(b, v)
	}
	if err != nil {
		return fmt.Errorf("record of kind %d: %w", m.kind, err)
	}
	plain.Record(v)
	return nil
}

// A call is a request to the store, or its reply.
type call struct {
	op     byte // an operation or, in a reply, a status
	n      int64
	fields [][]byte // nil and empty differ: nil means absent
}

// absentField is the encoded length of a nil field.
const absentField = 1<<32 - 1

func (c call) encode() []byte {
	size := 1 + 8 + 4
	for _, f := range c.fields {
		size += 4 + len(f)
	}
	b := make([]byte, 0, size)
	b = append(b, c.op)
	b = binary.BigEndian.AppendUint64(b, uint64(c.n))
	b = binary.BigEndian.AppendUint32(b, uint32(len(c.fields)))
	for _, f := range c.fields {
		if f == nil {
			b = binary.BigEndian.AppendUint32(b, absentField)
			continue
		}
		b = binary.BigEndian.AppendUint32(b, uint32(len(f)))
		b = append(b, f...)
	}
	return b
}

var errShortCall = errors.New("store call is truncated")

// decodeCall decodes a call. Its fields share the memory of b.
func decodeCall(b []byte) (call, error) {
	if len(b) < 13 {
		return call{}, errShortCall
	}
	c := call{op: b[0], n: int64(binary.BigEndian.Uint64(b[1:]))}
	count := binary.BigEndian.Uint32(b[9:])
	b = b[13:]
	// Each field needs at least four bytes, so a false count cannot cause a large allocation.
	if uint64(count)*4 > uint64(len(b)) {
		return call{}, errShortCall
	}
	c.fields = make([][]byte, 0, count)
	for range count {
		if len(b) < 4 {
			return call{}, errShortCall
		}
		n := binary.BigEndian.Uint32(b)
		b = b[4:]
		if n == absentField {
			c.fields = append(c.fields, nil)
			continue
		}
		if uint64(n) > uint64(len(b)) {
			return call{}, errShortCall
		}
		c.fields = append(c.fields, b[:n:n])
		b = b[n:]
	}
	if len(b) != 0 {
		return call{}, fmt.Errorf("%d bytes after a store call", len(b))
	}
	return c, nil
}
