package env

// clusterVars are the variables of package cluster and `chorus run`.
var clusterVars = []*Var{}
