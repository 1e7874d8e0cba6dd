package cluster

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// The connections of two hosts to the coordinator are reset, and then packets are dropped. Nothing has ended: the two
// go on, and the coordinator does not.
func TestResetAndSilence(t *testing.T) {
	t.Parallel()
	cfgs := elasticHosts(t, 1, 3, 0)
	r := newRelay(t, cfgs[0].Bind)
	for i, c := range cfgs {
		c.NoGossip, c.Seeds = true, []string{cfgs[0].Bind}
		if i > 0 {
			c.Seeds = []string{r.addr()}
		}
	}
	as, rs := elasticJob(t, RunConfig{}, cfgs...)
	r.freeze()
	r.reset()
	for _, x := range rs[1:] {
		require.Equal(t, 2, x.world(t, 2).Size())
	}
	require.ErrorContains(t, rs[0].returned(t), "this part of the network has 1 of the 3 hosts of epoch 1")
	var all sync.WaitGroup
	for _, x := range rs[1:] {
		close(x.finish)
		all.Go(func() { require.NoError(t, x.returned(t)) })
	}
	all.Wait()
	for _, a := range as {
		a.Close()
	}
}
