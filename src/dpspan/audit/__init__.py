"""Audits: what a private step does, measured against what it declares, and attacks on a model."""

from dpspan.audit.canaries import CanaryAudit as CanaryAudit
from dpspan.audit.canaries import audit_canaries as audit_canaries
from dpspan.audit.findings import Check as Check
from dpspan.audit.findings import StepAudit as StepAudit
from dpspan.audit.lower_bound import epsilon_lower_bound as epsilon_lower_bound
from dpspan.audit.membership import MembershipResult as MembershipResult
from dpspan.audit.membership import membership_inference as membership_inference
from dpspan.audit.step import audit_step as audit_step
