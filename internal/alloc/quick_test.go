package alloc

import (
	"compress/gzip"
	"encoding/json"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

func readGz(t testing.TB, path string, v any) {
	f, err := os.Open(path)
	require.NoError(t, err)
	z, err := gzip.NewReader(f)
	require.NoError(t, err)
	require.NoError(t, json.NewDecoder(z).Decode(v))
}

func TestQuick(t *testing.T) {
	var f struct {
		Sequences []struct {
			Seed, Streams int
			Ops           [][]any
		}
	}
	readGz(t, "/tmp/alloc_stats.json.gz", &f)
	for _, q := range f.Sequences {
		m := newMachine(t, 1<<40)
		d := m.device("")
		var arenas []*Arena
		for range q.Streams {
			arenas = append(arenas, must(d.Default().Arena(m.stream())))
		}
		live := map[int]uint64{}
		bad := 0
		defer func() { t.Log(q.Seed, bad) }()
		for i, op := range q.Ops {
			num := func(j int) int64 { return int64(op[j].(float64)) }
			var st []any
			switch op[0] {
			case "alloc":
				live[int(num(1))] = must(arenas[num(3)].Alloc(uint64(num(2))))
				st = op[4:]
			case "free":
				require.NoError(t, d.Free(live[int(num(1))]))
				delete(live, int(num(1)))
				st = op[2:]
			case "empty_cache":
				require.NoError(t, d.Empty())
				st = op[1:]
			default:
				for _, a := range live {
					require.NoError(t, d.Free(a))
				}
				require.NoError(t, d.Empty())
				st = op[1:]
			}
			if i%100 == 0 {
				d.check(t)
			}
			for g, x := range []Gauge{AllocatedBytes, ReservedBytes, ActiveBytes, InactiveSplitBytes, RequestedBytes, Allocation, Segments, Active, InactiveSplit} {
				s := d.Read(x)
				if x == InactiveSplit || x == InactiveSplitBytes {
					if st[3*g].(float64) != float64(s.All.Current) {
						bad++
					}
					continue
				}
				require.EqualValues(t, st[3*g], s.All.Current, "%d %v gauge %d", i, op, g)
				require.EqualValues(t, st[3*g+1], s.Small.Current)
				require.EqualValues(t, st[3*g+2], s.Large.Current)
			}
			require.EqualValues(t, st[28], d.Read(AllocatedBytes).All.Peak)
			require.EqualValues(t, st[29], d.Read(ReservedBytes).All.Peak)
		}
	}
}

func TestQuickTrain(t *testing.T) {
	var f struct {
		Events [][]any
	}
	readGz(t, "/tmp/trace_train.json.gz", &f)
	for _, conf := range []string{"", "expandable_segments:True"} {
		m := newMachine(t, 140<<30)
		d := m.device(conf)
		a := must(d.Default().Arena(m.stream()))
		live := map[int64]uint64{}
		for i, e := range f.Events {
			addr := int64(e[1].(float64))
			switch e[0] {
			case "alloc":
				live[addr] = must(a.Alloc(uint64(e[2].(float64))))
			case "free_completed":
				require.NoError(t, d.Free(live[addr]))
			}
			if i%1000 == 0 {
				d.check(t)
			}
		}
		r, al := d.Read(ReservedBytes).All.Peak, d.Read(AllocatedBytes).All.Peak
		t.Log(conf, r, al, float64(r)/float64(al), float64(r)/8321499136, m.calls)
	}
}
