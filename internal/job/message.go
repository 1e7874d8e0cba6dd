package job

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"

	"github.com/gochorus/chorus/internal/safe"
)

// FirstEpoch is the epoch in which a job starts, and the epoch of messages that do not
// belong to one, such as heartbeats.
const FirstEpoch = 1

type Kind byte

// Kinds of messages. Records are JSON, because they are rare and get new fields.
// Store calls are binary, because values are arbitrary bytes.
const (
	KindWelcome     Kind = iota + 1 // coordinator: welcome
	kindRegister                    // member: Member, or host
	kindBeat                        // both: see stream.heardBeat; the coordinator answers it at once
	kindRequestVote                 // coordinator to agents: leader; it asks them to stay with it; id is the attempt, or 0 if they need not any more
	kindVote                        // agent: nothing; it stays; id is the attempt
	kindAccepted                    // agent: nothing; it has recorded the proposal of an epoch; id is the try
	KindPrepared                    // worker: nothing; it has the proposal of an epoch; id is the try
	kindPlan                        // coordinator to agents: plan
	KindWorld                       // coordinator to workers: world
	KindWho                         // member: nothing; answered by kindRoll
	kindAttendance                  // coordinator: roll
	KindCall                        // worker: call
	kindCancel                      // worker: nothing; id of the call
	kindReply                       // coordinator: call
	kindExit                        // agent: Exit
	kindStop                        // agent: fault
	kindDone                        // agent: nothing; its workers have exited
	kindLeave                       // member: nothing
	KindFault                       // coordinator: fault
	kindNote                        // coordinator to agents: fault that does not stop hosts
	kindEnded                       // coordinator: nothing
	KindRefuse                      // coordinator: refusal
	KindSilent                      // member: nothing; it disconnects from a silent coordinator
	kindResume                      // member, first on a new link: id of the stream; epoch is the number of the request, and id of the last message received
	kindResumed                     // coordinator: nothing; the stream continues on this link
	kindKill                        // agent, and coordinator to agents: nothing; workers must not be given more time
	kindPath                        // agent: pathReport
	kindComplete                    // coordinator to agents: nothing; the world is complete
	kindReady                       // agent: nothing; its workers have exited and can be started again
	KindPropose                     // coordinator to workers: nothing, and to agents: news, of the next epoch; id is the attempt
	KindRevoke                      // coordinator to workers: fault; the epoch ends
	KindRevoked                     // worker: nothing; its function for this epoch has returned
	KindFinished                    // worker: nothing; its function has returned nil
	KindFailed                      // worker: fault; its function has returned an error
	KindFinish                      // coordinator to workers: nothing; all functions have returned nil
	KindDismiss                     // coordinator to workers: nothing; the host leaves the job
	KindHold                        // coordinator to workers: nothing; no step may begin until kindUntil
	KindHeld                        // worker: nothing; id is the number of steps begun
	KindUntil                       // coordinator to workers: nothing; id is the last step of the epoch
	kindOrder                       // coordinator to agents: Order
	kindNews                        // coordinator to agents: news; the epoch has begun
	kindDrain                       // agent: fault; its host leaves the job
	kindStatus                      // agent: nothing; answered by kindReply with a Status
	kindInquiry                     // coordinator to workers: nothing; id is the inquiry
	kindReport                      // worker: its report; id is the inquiry
	kindHandover                    // coordinator: handover; its host leaves the job
	kindElsewhere                   // agent, before registration, and coordinator to agents: elsewhere
	kindLedger                      // coordinator to agents: news with the ledger; id is the number of the entry
	kindRecorded                    // agent: nothing; it has the ledger with the entry id
	KindEnlisted                    // registry: nothing; the process is on the list
	KindInvite                      // registry: Invitation; id is the rank in the world
	kindLast                        // one more than the last
)

// A Message is the content of one frame.
type Message struct {
	Kind  Kind
	Epoch uint64
	ID    uint64 // number of a call, or of an attempt
	Body  []byte
	parts [][]byte  // more of the body: memory that several messages share
	holds []*buffer // of parts; released when the message is acknowledged or dropped
	// fromWorker is true at the coordinator if a worker has sent the message.
	fromWorker bool
}

const messageHeadBytes = 1 + 8 + 8

func (m Message) Encode() []byte {
	return bytes.Join(append([][]byte{m.head(), m.Body}, m.parts...), nil)
}

// head returns the message without its body.
func (m Message) head() []byte {
	b := make([]byte, 0, messageHeadBytes)
	b = append(b, byte(m.Kind))
	b = binary.BigEndian.AppendUint64(b, m.Epoch)
	return binary.BigEndian.AppendUint64(b, m.ID)
}

// bytes returns the length of the encoded message.
func (m Message) bytes() int {
	n := messageHeadBytes + len(m.Body)
	for _, p := range m.parts {
		n += len(p)
	}
	return n
}

// cost returns the approximate memory of a queued message without its parts: the store is charged with them.
func (m Message) cost() int { return messageBytes + len(m.Body) + partBytes*len(m.parts) }

const (
	messageBytes = 256
	partBytes    = 32
)

// release releases the shared memory.
func (m Message) release() {
	for _, b := range m.holds {
		b.release()
	}
}

func DecodeMessage(b []byte) (Message, error) {
	if len(b) < messageHeadBytes {
		return Message{}, fmt.Errorf("message of %d bytes: want at least %d", len(b), messageHeadBytes)
	}
	m := Message{
		Kind:  Kind(b[0]),
		Epoch: binary.BigEndian.Uint64(b[1:]),
		ID:    binary.BigEndian.Uint64(b[9:]),
		Body:  b[messageHeadBytes:],
	}
	if m.Kind == 0 || m.Kind >= kindLast {
		return Message{}, fmt.Errorf("message of unknown kind %d", m.Kind)
	}
	if m.Epoch < FirstEpoch {
		return Message{}, fmt.Errorf("message of epoch %d: epochs start with %d", m.Epoch, FirstEpoch)
	}
	return m, nil
}

// MaxText limits each text in a record, such as the error of a process. Other processes choose many of them,
// and one record has those of many processes.
const MaxText = 4 << 10

// Note creates a message with a record as its body, or without a body if v is nil. It clips texts that
// are too long, and clips them further while all texts together make the message too long.
func Note(k Kind, v any) Message {
	m := Message{Kind: k, Epoch: FirstEpoch}
	if v == nil {
		return m
	}
	record := marshalRecord(v)
	m.Body = Pack(record)
	if len(record) <= MaxText {
		return m
	}
	isLong := safe.LongestText(v) > MaxText
	// Without any texts, the message may still be too long: then the stream that is to carry it ends.
	for limit := MaxText; (isLong || m.bytes() > maxMessageBytes) && limit > maxNameBytes; limit /= 4 {
		short := reflect.New(reflect.TypeOf(v))
		if err := json.Unmarshal(record, short.Interface()); err != nil {
			panic("cluster: " + err.Error()) // cannot fail, as in marshalRecord
		}
		safe.ClipRecord(short.Interface(), limit)
		m.Body, isLong = Pack(marshalRecord(short.Interface())), false
	}
	return m
}

func marshalRecord(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil { // cannot fail: records contain only text and numbers
		panic("cluster: " + err.Error())
	}
	return b
}

// Record decodes a record into v, and escapes and clips its texts.
func (m Message) Record(v any) error {
	most := maxRecord
	if m.fromWorker {
		most = maxWorkerRecord
	}
	b, err := unpack(m.Body, most)
	if err == nil {
		err = json.Unmarshal(b, v)
	}
	if err != nil {
		return fmt.Errorf("record of kind %d: %w", m.Kind, err)
	}
	safe.ShortRecord(v, MaxText)
	return nil
}

// A Call is a request to the store, or its reply.
type Call struct {
	Op     byte // an operation or, in a reply, a status
	N      int64
	Fields [][]byte  // nil and empty differ: nil means absent
	holds  []*buffer // of a reply: the memory of fields; empty, or with nil for short ones
}

// absentField is the encoded length of a nil field.
const absentField = 1<<32 - 1

func (c Call) Encode() []byte {
	m := c.message(0, 0, 0)
	return bytes.Join(append([][]byte{m.Body}, m.parts...), nil)
}

// shareFrom is the length from which on messages share a value, instead of copying it.
const shareFrom = 256

// message returns a message with the call, whose long values it shares with the
// store.
func (c Call) message(k Kind, epoch, id uint64) Message {
	size := 1 + 8 + 4
	for _, f := range c.Fields {
		if size += 4; len(f) < shareFrom {
			size += len(f)
		}
	}
	b := make([]byte, 0, size)
	b = append(b, c.Op)
	b = binary.BigEndian.AppendUint64(b, uint64(c.N))
	b = binary.BigEndian.AppendUint32(b, uint32(len(c.Fields)))
	m := Message{Kind: k, Epoch: epoch, ID: id}
	from := 0 // what of b is not in m yet
	cut := func() {
		if m.Body == nil {
			m.Body = b[:len(b):len(b)]
		} else {
			m.parts = append(m.parts, b[from:len(b):len(b)])
		}
		from = len(b)
	}
	for i, f := range c.Fields {
		if f == nil {
			b = binary.BigEndian.AppendUint32(b, absentField)
			continue
		}
		b = binary.BigEndian.AppendUint32(b, uint32(len(f)))
		if len(f) < shareFrom {
			b = append(b, f...)
			continue
		}
		cut()
		m.parts = append(m.parts, f)
		if i < len(c.holds) && c.holds[i] != nil {
			m.holds = append(m.holds, c.holds[i].retain())
		}
	}
	if from < len(b) {
		cut()
	}
	return m
}

var ErrShortCall = errors.New("store call is truncated")

// decodeCall decodes a call, whose fields share the memory of b.
func decodeCall(b []byte) (Call, error) {
	if len(b) < 13 {
		return Call{}, ErrShortCall
	}
	c := Call{Op: b[0], N: int64(binary.BigEndian.Uint64(b[1:]))}
	count := binary.BigEndian.Uint32(b[9:])
	b = b[13:]
	// Each field needs at least four bytes, so a false count cannot cause a large allocation.
	if uint64(count)*4 > uint64(len(b)) {
		return Call{}, ErrShortCall
	}
	c.Fields = make([][]byte, 0, count)
	for range count {
		if len(b) < 4 {
			return Call{}, ErrShortCall
		}
		n := binary.BigEndian.Uint32(b)
		b = b[4:]
		if n == absentField {
			c.Fields = append(c.Fields, nil)
			continue
		}
		if uint64(n) > uint64(len(b)) {
			return Call{}, ErrShortCall
		}
		c.Fields = append(c.Fields, b[:n:n])
		b = b[n:]
	}
	if len(b) != 0 {
		return Call{}, fmt.Errorf("%d bytes after a store call", len(b))
	}
	return c, nil
}
