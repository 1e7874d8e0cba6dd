package cluster

import (
	"bytes"
	"encoding/json"
	"net"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

// FuzzLink feeds a link what comes behind the handshake.
func FuzzLink(f *testing.F) {
	f.Add([]byte{0, 0, 0, 17, 1})
	f.Add([]byte{0xff, 0xff, 0xff, 0xff})
	f.Add(make([]byte, 64))
	f.Fuzz(func(t *testing.T, b []byte) {
		a, c := net.Pipe()
		defer c.Close()
		go func() {
			_, _ = a.Write(b)
			a.Close()
		}()
		aead, err := frameCipher(make([]byte, keyBytes), nil, "fuzz")
		require.NoError(t, err)
		l := &link{c: c, seal: aead, open: aead}
		for err == nil {
			_, err = l.read()
		}
	})
}

// FuzzDetect reads environments: names and values in lines.
func FuzzDetect(f *testing.F) {
	for launcher, env := range oneHostEnvs {
		f.Add(strings.ReplaceAll(env, " ", "\n") + "\nCHORUS_LAUNCHER=" + launcher)
	}
	f.Add("SLURM_JOB_ID=100\nSLURM_PROCID=5\nSLURM_NTASKS=7\nSLURM_NODEID=1\nSLURM_STEP_NODELIST=g[01-02]\nSLURM_STEP_TASKS_PER_NODE=4,3")
	f.Add("CHORUS_RANK=1\nCHORUS_WORLD_SIZE=2\nCHORUS_ADDR=a:1\nCHORUS_TOKEN=" + testToken)
	f.Fuzz(func(t *testing.T, s string) {
		vars := map[string]string{}
		for line := range strings.SplitSeq(s, "\n") {
			if name, value, ok := strings.Cut(line, "="); ok && name != "CHORUS_SECRET_FILE" {
				vars[name] = value
			}
		}
		c, err := detect(func(n string) (string, bool) { v, ok := vars[n]; return v, ok })
		if err != nil {
			return
		}
		require.True(t, c.Rank == nil || *c.Rank >= 0 && *c.Rank < max(c.Size, 1))
		_, _ = c.complete()
	})
}

// FuzzHistory reads what an agent tells a coordinator, and what a coordinator tells agents.
func FuzzHistory(f *testing.F) {
	f.Add([]byte(`{"run":"r","term":2,"epoch":3,"voters":["a","b"],"proposed":[{"epoch":4,"voters":["a"]}],"plan":{"hosts":[{"uuid":"a"},{"uuid":"b"}]},"members":[{"node":1}],"ledger":{"used":1,"restarts":[{"agent":"a","total":1}]}}`))
	f.Add([]byte(`{"epoch":1,"voters":["a","a"],"members":[{"node":7}]}`))
	f.Add([]byte(`{"by":{"term":3,"agent":"a"},"plan":{"hosts":[{"uuid":"a"}]},"members":[{"node":-1}],"voters":["b"]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var c history
		if json.Unmarshal(b, &c) == nil && c.check() == nil {
			for _, m := range c.Members {
				require.GreaterOrEqual(t, m.Node, 0)
				_ = c.hostOf(m)
			}
			o := c
			c.merge(&o)
			require.GreaterOrEqual(t, c.last(), c.Epoch)
			require.LessOrEqual(t, len(c.voterSets()), 1+len(o.Proposed))
			_, _ = c.addresses(), c.isPossible()
			require.Empty(t, c.open(c.last()))
		}
		var n news
		if json.Unmarshal(b, &n) == nil && n.check() == nil {
			a := &Agent{uuid: "a", cfg: Config{Notify: func(string) {}}, voter: newVoter(1)}
			a.now.Store(&attempt{})
			if a.news(firstEpoch, n) == nil && a.history != nil {
				require.GreaterOrEqual(t, a.promise().Term, n.By.Term)
			}
			_ = a.news(firstEpoch, n)
		}
	})
}

// FuzzStore gives the engine calls of two ranks, and compares what it keeps with what it charges.
func FuzzStore(f *testing.F) {
	f.Add([]byte{1, 'a', 3, 'b', 6, 'a', 3, 'a', 7, 'x', 9, 'a'})
	f.Fuzz(func(t *testing.T, b []byte) {
		e := newEngine(2, new(atomic.Int64))
		for i := 0; i+1 < len(b); i += 2 {
			at, key := ticket{int(b[i]) / 20 % 2, uint64(i)}, b[i+1:i+2]
			c := call{op: b[i] % 20, n: int64(int8(b[i+1])), fields: [][]byte{key}}
			switch c.op {
			case opSet:
				c.fields = append(c.fields, bytes.Repeat(key, int(b[i])))
			case opSwap:
				c.fields = append(c.fields, nil, key)
			case opSetAll, opAppend:
				c.fields = append(c.fields, bytes.Repeat(key, int(b[i])))
			case opWait, opGetAll, opHas:
				c.fields = append(c.fields, b[:i])
			case opCount:
				c.fields = nil
			case 19:
				e.cancel(ticket{0, uint64(b[i+1])})
				continue
			}
			e.do(at, c, func(r call) { require.True(t, r.op != statusOK || c.op != opGetAll || len(r.fields) > 0) })
		}
		require.Equal(t, charged(e), e.total())
		e.dropRank(0)
		e.dropRank(1)
		require.Equal(t, charged(e), e.total())
	})
}

// FuzzIsStopped reads /proc/<pid>/stat of a process with any name.
func FuzzIsStopped(f *testing.F) {
	f.Add([]byte("a"), byte('T'))
	f.Add([]byte(") T ("), byte('S'))
	f.Fuzz(func(t *testing.T, name []byte, state byte) {
		stat := append(append([]byte("12 ("), name...), ')', ' ', state)
		require.Equal(t, state == 'T' || state == 't', isStopped(append(stat, " 1 1"...)))
		_ = isStopped(name)
	})
}
