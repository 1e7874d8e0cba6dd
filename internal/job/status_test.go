package job

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestStatusOfSilentProcesses asks for the status while one process does not answer, one has
// answered too much, and one has left.
func TestStatusOfSilentProcesses(t *testing.T) {
	j, agent, worker := judged()
	s, of := j.served()
	s.world = &World{}
	for rank := range 3 {
		w := worker(rank)
		w.reg.PID = 100 + rank
		s.world.Members = append(s.world.Members, w.reg.Member)
	}
	worker(2).state = peerGone
	s.inquire(of(agent), 7)
	s.inquire(of(agent), 8)
	q := s.inquiry
	require.Len(t, q.askers, 2)
	q.most = 10
	s.reported(worker(2), Message{Kind: kindReport, ID: q.id, Body: []byte("{}")})
	s.reported(worker(0), Message{Kind: kindReport, ID: q.id + 1, Body: []byte("{}")})
	require.Len(t, q.waiting, 2, "answers of others, and to other questions, do not count")
	s.reported(worker(1), Message{Kind: kindReport, ID: q.id, Body: make([]byte, 11)})
	x := s.status(q)
	require.Equal(t, "it did not answer within 1s: it is stopped, busy or unreachable", x.Members[0].Missing)
	require.Equal(t, "its report has 11 bytes: a job of 3 processes has room for 10", x.Members[1].Missing)
	require.Equal(t, "ended", x.Members[2].State)
	s.mu.Lock()
	s.answerInquiry(q)
	s.unlock()
	require.Nil(t, s.inquiry)
	s.wg.Wait()
	out := of(agent).out
	for i, id := range []uint64{7, 8} {
		m := out[len(out)-2+i]
		require.Equal(t, kindReply, m.Kind)
		require.Equal(t, id, m.ID)
	}
}

// TestLongStatus packs reports that do not fit in a message.
func TestLongStatus(t *testing.T) {
	s := &Status{Job: "j"}
	for rank := range 64 {
		s.Members = append(s.Members, MemberStatus{Member: Member{Rank: rank}, Report: RandomBytes(64 << 10)})
	}
	got, err := unpackStatus(s.pack())
	require.NoError(t, err)
	require.Len(t, got.Members, 64)
	require.Nil(t, got.Members[0].Report)
	require.Equal(t, "the reports of all processes together are too long", got.Members[63].Missing)

	s.Members = s.Members[:1]
	s.Members[0].Report, s.Members[0].Host = bytes.Repeat([]byte(" "), 1<<16), "a\x1b[2J"
	got, err = unpackStatus(s.pack())
	require.NoError(t, err)
	require.Len(t, got.Members[0].Report, 1<<16)
	require.Equal(t, `a\x1b[2J`, got.Members[0].Host)
}

// TestWorkersCannotAsk sends the question of a launcher as a worker.
func TestWorkersCannotAsk(t *testing.T) {
	j, _, worker := judged()
	s, of := j.served()
	require.Error(t, s.handleMessage(of(worker(0)), Message{Kind: kindStatus, Epoch: FirstEpoch}))
	require.Nil(t, s.inquiry)
}

// FuzzStatus decodes the coordinator's answer.
func FuzzStatus(f *testing.F) {
	f.Add((&Status{Job: "j", Members: []MemberStatus{{State: "running", Report: []byte("{}")}}}).pack())
	f.Add([]byte{0x1f, 0x8b})
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := unpackStatus(b)
		if err != nil {
			return
		}
		text, err := json.Marshal(s)
		require.NoError(t, err)
		require.False(t, strings.ContainsRune(string(text), 0x1b), fmt.Sprint(s))
	})
}

// TestStatusIsLinear: the coordinator, which holds its lock, does not search for each process among all others. Eight times as many
// processes take about eight times as long, and would take 64 times as long otherwise.
func TestStatusIsLinear(t *testing.T) {
	takes := func(n int) time.Duration {
		c, _, _ := judged()
		x, _ := c.served()
		c.workers = nil
		for rank := range n {
			p := &peer{role: roleWorker, state: peerJoined}
			p.reg.Member = Member{Rank: n - 1 - rank, Host: "h", PID: 100 + rank}
			c.workers = append(c.workers, p)
		}
		c.world = &World{Members: members(c.workers)}
		least := time.Hour
		for range 3 {
			begin := processorTime()
			s := x.status(&inquiry{})
			least = min(least, processorTime()-begin)
			require.Equal(t, "running", s.Members[n/2].State)
			require.Equal(t, c.world.Members[n/2], s.Members[n/2].Member)
		}
		return least
	}
	few, many := takes(4_000), takes(32_000)
	t.Logf("processor time: %v for 4,000 processes, %v for 32,000", few, many)
	require.Less(t, many, 24*max(few, 20*time.Millisecond))
}
