"""Attacks on a trained model: what it tells about the samples that it was trained on."""

from dpspan.audit.membership import MembershipResult as MembershipResult
from dpspan.audit.membership import membership_inference as membership_inference
