package comm

import "github.com/gochorus/chorus/cluster"

// TakeSession takes the session away from a group, whose Shutdown then does not leave the
// job.
func TakeSession(g *Group) *cluster.Session {
	s := g.session
	g.session = nil
	return s
}
