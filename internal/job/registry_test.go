package job

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// registryOnPaper returns a registry without connections.
func registryOnPaper() *paperJob {
	return onPaper(CoordConfig{Registry: true, Self: Welcome{Rank: -1, Registry: true, Host: "r", Heartbeat: time.Second, LostAfter: 4 * time.Second}})
}

// come lets a process register.
func (j *paperJob) come(reg Registration) *peer {
	p := &peer{addr: "10.0.0.1:1", heard: j.now}
	if err := j.handle(p, Note(kindRegister, reg)); err != nil {
		panic(err)
	}
	return p
}

func member(name string) Registration {
	return Registration{Enlists: true, Value: []byte(name), Member: Member{Rank: -1, Host: "host-" + name, PID: 7, Name: name}}
}

// refusal returns why a process was refused, or "".
func (j *paperJob) refusal(t *testing.T, p *peer) string {
	t.Helper()
	for _, m := range j.queues[p] {
		if m.Kind == KindRefuse {
			var r Refusal
			require.NoError(t, m.Record(&r))
			require.Equal(t, peerGone, p.state)
			return r.Err("j", "addr").Error()
		}
	}
	require.Equal(t, peerJoined, p.state)
	require.Equal(t, KindEnlisted, j.queues[p][0].Kind)
	return ""
}

func (j *paperJob) names() (out []string) {
	for _, p := range j.workers {
		out = append(out, p.reg.Name)
	}
	return out
}

// Each way to go takes a member off the list, and the registry says how it went when it is asked for.
func TestMembersOfARegistryGo(t *testing.T) {
	j := registryOnPaper()
	a, b, c, d := j.come(member("a")), j.come(member("b")), j.come(member("c")), j.come(member("d"))
	require.Equal(t, []string{"a", "b", "c", "d"}, j.names())
	require.Equal(t, 4*time.Second, j.silenceLimit(), "a registry needs no time to start")
	require.NoError(t, j.handle(a, Message{Kind: kindLeave, Epoch: FirstEpoch}))
	require.NoError(t, j.happen(disconnected{a, ending{reason: "its connection closed", closed: true}})) // a consequence
	require.NoError(t, j.happen(disconnected{b, ending{reason: "silent for 4s"}}))
	require.NoError(t, j.handle(c, Message{Kind: KindSilent, Epoch: FirstEpoch}))
	require.Equal(t, []string{"d"}, j.names())
	require.Len(t, j.departed, 3)
	err := j.happen(invite{names: []string{"d", "a", "b", "c", "e"}, to: Invitation{"w", 5}})
	require.EqualError(t, err, "member a (host host-a pid 7) has left; member b (host host-b pid 7) was lost: silent for 4s; "+
		"member c (host host-c pid 7) was lost: it has heard nothing from the registry for 4s and disconnected; no member has the name e")
	require.Len(t, j.queues[d], 1, "nobody is invited")
	require.Len(t, j.lines, 2, "those that were lost")

	b = j.come(member("b")) // another process
	require.NoError(t, j.happen(invite{names: []string{"b", "d"}, to: Invitation{"w", 2}}))
	for rank, p := range []*peer{b, d} {
		m := j.queues[p][1]
		var in Invitation
		require.NoError(t, m.Record(&in))
		require.Equal(t, []any{KindInvite, uint64(rank), Invitation{"w", 2}}, []any{m.Kind, m.ID, in})
	}
	require.NoError(t, j.handle(d, Message{Kind: KindFinished, Epoch: FirstEpoch}))
	require.Equal(t, []string{"d", "b"}, j.names(), "a member decides nothing")
	for i := range 2 * maxDepartures {
		p := j.come(member(fmt.Sprint(i)))
		require.NoError(t, j.handle(p, Message{Kind: kindLeave, Epoch: FirstEpoch}))
	}
	require.Len(t, j.departed, maxDepartures)
	require.Empty(t, j.waitingLine())
	status, err := j.mayCall(d, FirstEpoch)
	require.NoError(t, err)
	require.Equal(t, byte(statusBad), status, "it has no store")
}

// A process that knows it is on the list finds the list changed.
func TestListChangesBeforeItsMemberKnows(t *testing.T) {
	j := registryOnPaper()
	m := Note(kindRegister, member("a"))
	in, err := m.decode()
	require.NoError(t, err)
	actions, err := j.step(j.now, received{&peer{addr: "10.0.0.1:1", heard: j.now}, in})
	require.NoError(t, err)
	changes := slices.IndexFunc(actions, func(a action) bool { _, ok := a.(listed); return ok })
	knows := slices.IndexFunc(actions, func(a action) bool { s, ok := a.(send); return ok && s.m.kind == KindEnlisted })
	require.GreaterOrEqual(t, changes, 0)
	require.Greater(t, knows, changes)
}

// Hostile and mistaken processes with the secret are refused in words.
func TestRegistryObjections(t *testing.T) {
	j := registryOnPaper()
	j.come(member("a"))
	other := member("b")
	other.Enlists = false
	long, forged, none, big := member("a"), member("a\x1b[2J"), member(""), member("b")
	long.Name, big.Value = strings.Repeat("x", maxNameBytes+1), make([]byte, MaxEnlistedBytes+1)
	for want, reg := range map[string]Registration{
		"the name a is taken: by host host-a pid 7, and now claimed by host host-a pid 7": member("a"),
		"call cluster.Enlist":             other,
		"has 256 bytes: want at most 255": long,
		"want graphic characters":         forged,
		"needs a name":                    none,
		"its value has 16385 bytes":       big,
	} {
		require.Contains(t, j.refusal(t, j.come(reg)), want)
	}
	for i := range MaxEnlisted - 1 {
		require.Empty(t, j.refusal(t, j.come(member(fmt.Sprint(i)))))
	}
	require.Contains(t, j.refusal(t, j.come(member("more"))), "4096 members already")
	require.Len(t, j.workers, MaxEnlisted)
}

// FuzzRegistry lets a process with the secret say anything to a registry.
func FuzzRegistry(f *testing.F) {
	for _, reg := range []Registration{member("b"), {Enlists: true}, {Size: 4, Member: Member{Rank: 3}}} {
		b, err := json.Marshal(reg)
		require.NoError(f, err)
		f.Add(byte(kindRegister), uint64(RegisterWorker), b)
	}
	f.Add(byte(KindRevoked), uint64(1), []byte(nil))
	f.Add(byte(kindRegister), uint64(registerAgent), []byte(`{"host":"h","uuid":"u","nodes":1}`))
	f.Fuzz(func(t *testing.T, kind byte, id uint64, body []byte) {
		j := registryOnPaper()
		j.come(member("a"))
		p := &peer{addr: "10.0.0.2:1", worker: true}
		for range 2 { // before and after it has registered
			if m, err := DecodeMessage(Message{Kind: Kind(kind), Epoch: FirstEpoch, ID: id, Body: Pack(body)}.Encode()); err == nil {
				_ = j.handle(p, m)
			}
		}
		require.Equal(t, "a", j.workers[0].reg.Name)
		require.Equal(t, peerJoined, j.workers[0].state)
		for _, q := range j.workers {
			require.NoError(t, CheckName("member", q.reg.Name))
			require.LessOrEqual(t, len(q.reg.Value), MaxEnlistedBytes)
		}
		require.Nil(t, j.world)
	})
}

// A world fails if one of its processes leaves the registry before all have come, and later only if it is lost.
func TestWorldsOfARegistry(t *testing.T) {
	world := func(come int) (*paperJob, []*peer) {
		j := onPaper(CoordConfig{Size: 3, JoinBy: time.Hour, Self: Welcome{Rank: -1, Registry: true, LostAfter: time.Second}})
		ps := make([]*peer, come)
		for i := range ps {
			ps[i] = j.come(Registration{Size: 3, Member: Member{Rank: i, Host: "h", PID: i + 1, LocalRank: -1, Node: -1}})
		}
		require.Equal(t, come == 3, j.world != nil)
		return j, ps
	}
	faultOf := func(j *paperJob, p *peer) *Fault {
		for _, m := range j.queues[p] {
			if m.Kind == KindFault {
				f := new(Fault)
				require.NoError(t, m.Record(f))
				return f
			}
		}
		return nil
	}
	gone := Fault{Rank: 2, Host: "x", PID: 9, Reason: "left", Code: -1}
	for _, left := range []bool{true, false} {
		j, ps := world(2)
		require.False(t, j.isOver())
		require.NoError(t, j.happen(absent{gone, left}))
		require.Equal(t, &gone, faultOf(j, ps[0]))
		require.Equal(t, &gone, faultOf(j, j.come(Registration{Size: 3, Member: Member{Rank: 2}})), "who comes late learns of it")
		require.False(t, j.isOver(), "those who came have not left")
		for _, p := range ps {
			require.NoError(t, j.handle(p, Message{Kind: kindLeave, Epoch: FirstEpoch}))
		}
		require.True(t, j.isOver())
	}
	j, ps := world(3)
	require.NoError(t, j.happen(absent{gone, true}))
	require.Nil(t, faultOf(j, ps[0]), "it is still in the world")
	require.NoError(t, j.happen(absent{gone, false}))
	require.Equal(t, &gone, faultOf(j, ps[0]))

	j, ps = world(3)
	require.NoError(t, j.handle(ps[2], Message{Kind: kindLeave, Epoch: FirstEpoch}))
	require.NoError(t, j.happen(absent{gone, false}))
	require.Nil(t, faultOf(j, ps[0]), "it had left the world")

	enlists := Registration{Enlists: true, Member: Member{Rank: -1, Name: "a"}}
	j, _ = world(1)
	require.Contains(t, j.refusal(t, j.come(enlists)), "call cluster.Join")
}

// A hub gives connections to the coordinator of their job, and those of unknown jobs and versions to the first one.
func TestHub(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	h := NewHub(ln, func(string) {})
	defer h.Close()
	hello := func(version byte, job string) []byte {
		tag := JobTag(job)
		return append(Concat(Magic[:], []byte{version}, tag[:]), make([]byte, HelloBytes-5-tagBytes)...)
	}
	first, second := h.Listen("first"), h.Listen("second")
	require.Equal(t, h.ln.Addr(), second.Addr())
	send := func(b []byte) net.Conn {
		c, err := net.Dial("tcp", h.ln.Addr().String())
		require.NoError(t, err)
		t.Cleanup(func() { c.Close() })
		_, err = c.Write(b)
		require.NoError(t, err)
		return c
	}
	for _, tc := range []struct {
		to net.Listener
		b  []byte
	}{{first, hello(ProtocolVersion, "first")}, {second, hello(ProtocolVersion, "second")}, {first, hello(ProtocolVersion, "third")}, {first, hello(ProtocolVersion-1, "second")}} {
		send(tc.b)
		c, err := tc.to.Accept()
		require.NoError(t, err)
		got := make([]byte, len(tc.b))
		_, err = io.ReadFull(c, got)
		require.NoError(t, err)
		require.Equal(t, tc.b, got, "the coordinator reads all bytes")
		require.NoError(t, c.Close())
	}
	require.NoError(t, second.Close())
	require.NoError(t, second.Close())
	send(hello(ProtocolVersion, "second"))
	c, err := first.Accept()
	require.NoError(t, err)
	require.NoError(t, c.Close())
	require.NoError(t, first.Close())
	for _, text := range []string{"GET / HTTP/1.1", "ch", string(hello(ProtocolVersion, "first")[:9]), string(hello(ProtocolVersion, "first"))} {
		c := send([]byte(text))
		_ = c.(*net.TCPConn).CloseWrite() // the hub may have closed it already
		_, err := c.Read(make([]byte, 1))
		require.Error(t, err, "closed without a word")
	}
}
